//! Short messages of the ranks to the launcher while they work, such as how far they are.

use std::fmt::Debug;
use std::io::Write;

use comm::launcher::is_worker;

use super::lines::NOTE_PREFIX;

/// Set where the launcher wants notes.
pub(super) const WANTED: &str = "GIRANDOLE_NOTES";

/// What a launcher does with the notes of its ranks: a bar that shows how far they are, for instance.
pub trait Notes: Debug + Send + Sync {
    /// A rank has passed this text to [`send_note`]. Called by the thread that forwards standard output, so it should be
    /// quick.
    fn note(&self, rank: usize, text: &str);

    /// A rank's line is about to be written, by `write`: call it once, with whatever is shown out of its way. Two threads
    /// may do so at the same time, one for standard output and one for standard error.
    fn aside(&self, write: &mut dyn FnMut());
}

/// True where a launcher started this process and wants notes.
///
/// ```
/// assert!(!launch::wants_notes());
/// ```
pub fn wants_notes() -> bool {
    is_worker() && std::env::var_os(WANTED).is_some_and(|value| value == "1")
}

/// Passes a short text to the launcher, in the order of the lines on standard output. Does nothing where it wants none,
/// where the text has several lines, and where it cannot be written: a note may get lost.
///
/// ```
/// launch::send_note("step 3 of 100");
/// ```
pub fn send_note(text: &str) {
    if text.contains('\n') || !wants_notes() {
        return;
    }
    let mut out = std::io::stdout().lock();
    // See above.
    let _ = out.write_all(format!("{NOTE_PREFIX}{text}\n").as_bytes()).and_then(|()| out.flush());
}
