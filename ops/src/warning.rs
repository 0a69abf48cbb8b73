//! Warnings that are given once.

/// Warns through `tracing`, or on standard error where no subscriber takes warnings, since it is reported only once.
pub fn warn(text: &str) {
    match tracing::enabled!(tracing::Level::WARN) {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}
