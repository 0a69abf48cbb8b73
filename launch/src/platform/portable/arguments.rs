//! Parser for `KERN_PROCARGS2` of Apple's systems: the number of arguments, the path of the executable, zero bytes, the
//! arguments, the environment variables, each ended by a zero byte.

/// Returns the environment variables; `None` if the data is incomplete.
#[cfg_attr(not(target_vendor = "apple"), allow(dead_code, reason = "tested everywhere"))]
pub(super) fn variables(shown: &[u8]) -> Option<&[u8]> {
    let (count, rest) = shown.split_first_chunk()?;
    let file_end = rest.iter().position(|&byte| byte == 0)?;
    let rest = &rest[file_end..];
    let first = rest.iter().position(|&byte| byte != 0)?;
    let mut rest = &rest[first..];
    for _ in 0..i32::from_ne_bytes(*count) {
        let end = rest.iter().position(|&byte| byte == 0)?;
        rest = &rest[end + 1..];
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_come_after_as_many_arguments_as_there_are() {
        let mut shown = 3i32.to_ne_bytes().to_vec();
        shown.extend(b"/bin/echo\0\0\0\0\0echo\0A=1\0\0B=2\0C=3\0");
        assert_eq!(variables(&shown), Some(&b"B=2\0C=3\0"[..]));
        for len in 0..shown.len() - 8 {
            // Truncated data yields `None`, and no panic.
            assert_eq!(variables(&shown[..len]), None, "{len} bytes");
        }
        let mut many = i32::MAX.to_ne_bytes().to_vec();
        many.extend(b"/bin/echo\0echo\0");
        assert_eq!(variables(&many), None);
    }
}
