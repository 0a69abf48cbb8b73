//! Text that other processes have sent.

/// At most `limit` characters, none of which moves the cursor of whoever reads it.
pub(super) fn tidy(text: &str, limit: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(limit).collect()
}
