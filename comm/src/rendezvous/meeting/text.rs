//! Sanitizing text that other processes have sent.

/// Returns at most `limit` characters, with control characters replaced by blanks, so that none controls a terminal.
pub(super) fn sanitize(text: &str, limit: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(limit).collect()
}
