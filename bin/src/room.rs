//! Whether a model has room on this machine: looked at before anything is allocated, for then nothing would stop it but the system.

use crate::report::total_memory_bytes;

const GIB: f64 = (1u64 << 30) as f64;

/// What is wrong with a model of so many parameters, or whatever they are called, of which a rank needs so many bytes at least.
/// Floats do not overflow, whatever is typed.
pub(crate) fn too_large(count: f64, what: &str, bytes: f64) -> Option<String> {
    total_memory_bytes().and_then(|there_is| too_large_for(there_is, (count, what), bytes))
}

/// The same on a machine of so many bytes.
fn too_large_for(there_is: u64, (count, what): (f64, &str), bytes: f64) -> Option<String> {
    let (needed, there_is) = (bytes / GIB, there_is as f64 / GIB);
    (needed > there_is).then(|| {
        let rounded = if needed < 1e6 { format!("{needed:.0}") } else { format!("{needed:.1e}") };
        format!(
            "with the other sizes that makes {count:.1e} {what}, {rounded} GiB, and this machine has {there_is:.0} GiB: \
             make the model smaller"
        )
    })
}

/// Bytes of a rank's part of the parameters, of which Adam remembers two numbers each; all are f32.
pub(crate) fn with_adam(parameters: f64, parts: usize) -> f64 {
    3.0 * 4.0 * parameters / parts.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_is_told_in_one_line() {
        assert_eq!(too_large_for(1 << 30, (1e6, "parameters"), 4e6), None);
        let line = too_large_for(1 << 30, (1e12, "parameters"), with_adam(1e12, 4)).unwrap();
        assert!(line.contains("1.0e12 parameters, 2794 GiB, and this machine has 1 GiB"), "{line}");
        let huge = too_large_for(1 << 30, (f64::MAX, "parameters"), f64::INFINITY).unwrap();
        assert!(huge.len() < 250, "{huge}");
    }
}
