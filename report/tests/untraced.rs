//! Without `--trace`: warnings are logged, spans are off. A process of its own, since logging is set up once.
#![allow(clippy::unwrap_used)]

#[test]
fn spans_are_off_and_warnings_are_on() {
    assert!(report::trace::install(false).unwrap().is_none());
    assert!(tracing::info_span!("step").is_disabled());
    assert!(tracing::enabled!(tracing::Level::WARN));
    assert!(!tracing::enabled!(tracing::Level::INFO));
    assert_eq!(tracing::level_filters::LevelFilter::current(), tracing::level_filters::LevelFilter::WARN);
}
