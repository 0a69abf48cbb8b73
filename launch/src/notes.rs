//! Notes: short messages from the ranks to the launcher while they work, such as their progress.

use std::fmt::Debug;
use std::io::Write;

use comm::launcher::is_worker;

use super::lines::NOTE_PREFIX;

/// Environment variable that is `1` if the launcher wants notes.
pub(super) const WANTED: &str = "GIRANDOLE_NOTES";

/// Handles the notes of the ranks in the launcher, for instance with a progress bar.
pub trait Notes: Debug + Send + Sync {
    /// Called when a rank has passed this text to [`send_note`]. Runs on the thread that forwards standard output, so
    /// it should be quick.
    fn note(&self, rank: usize, text: &str);

    /// Called when a rank's line is about to be written, by `write`. Call `write` exactly once, with whatever is
    /// displayed cleared away. Two threads may call this at the same time, one for standard output and one for standard
    /// error.
    fn aside(&self, write: &mut dyn FnMut());
}

/// Whether a launcher started this process and wants notes.
///
/// ```
/// assert!(!launch::wants_notes());
/// ```
pub fn wants_notes() -> bool {
    is_worker() && std::env::var_os(WANTED).is_some_and(|value| value == "1")
}

/// Sends a short text to the launcher, in order with the lines on standard output. Does nothing if the launcher wants
/// no notes or the text has several lines; errors are ignored, so a note may get lost.
///
/// ```
/// launch::send_note("step 3 of 100");
/// ```
pub fn send_note(text: &str) {
    if text.contains('\n') || !wants_notes() {
        return;
    }
    let mut out = std::io::stdout().lock();
    // Errors are ignored, see above.
    let _ = out.write_all(format!("{NOTE_PREFIX}{text}\n").as_bytes()).and_then(|()| out.flush());
}
