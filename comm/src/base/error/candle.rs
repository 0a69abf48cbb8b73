//! Conversion of this crate's errors to candle's and back.

use std::sync::Arc;

use crate::Error;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        carry(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        match carried::<Error>(&source) {
            Some(error) => error.clone(),
            None => Error::Tensor { operation: "tensor operation".into(), source: Arc::new(source) },
        }
    }
}

/// Wraps an error in a candle error, for functions that return candle's errors only. [`carried`] extracts it again.
///
/// ```
/// let error = comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
/// let through = comm::carry(error).context("in the model");
/// assert!(matches!(comm::carried(&through), Some(comm::Error::PeerLeft { rank: 1, .. })));
/// ```
pub fn carry<E: std::error::Error + Send + Sync + 'static>(error: E) -> candle_core::Error {
    // Candle does not change an I/O error.
    candle_core::Error::Io(std::io::Error::other(error))
}

/// Returns the error of type `E` that was passed to [`carry`], whatever candle, or an operation of this crate, has
/// wrapped around it.
pub fn carried<E: std::error::Error + Send + Sync + 'static>(error: &candle_core::Error) -> Option<&E> {
    match error {
        candle_core::Error::Io(error) => {
            let error = error.get_ref()?;
            let within = || match error.downcast_ref()? {
                Error::Tensor { source, .. } => carried(source),
                _ => None,
            };
            error.downcast_ref().or_else(within)
        }
        candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. }
        | candle_core::Error::WithBacktrace { inner, .. } => carried(inner),
        _ => None,
    }
}

/// Returns the error of type `E` that a candle error carries, or else the [`Error`] of this crate, converted to `E`. See
/// [`carried`].
///
/// ```
/// #[derive(Debug, Clone, thiserror::Error)]
/// enum Error {
///     #[error(transparent)]
///     Config(#[from] std::num::ParseIntError),
///     #[error(transparent)]
///     Comm(#[from] comm::Error),
/// }
///
/// let own = comm::carry(Error::Config("many".parse::<u8>().unwrap_err())).context("in the model");
/// assert!(matches!(comm::internal::carried_as(&own), Some(Error::Config(_))));
/// let left = comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
/// let through = comm::carry(left).context("in the model");
/// assert!(matches!(comm::internal::carried_as(&through), Some(Error::Comm(comm::Error::PeerLeft { rank: 1, .. }))));
/// ```
pub fn carried_as<E>(error: &candle_core::Error) -> Option<E>
where
    E: std::error::Error + From<Error> + Clone + Send + Sync + 'static,
{
    let of_comm = || carried::<Error>(error).cloned().map(E::from);
    carried::<E>(error).cloned().or_else(of_comm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_errors_survive_candle() {
        let ours = Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
        let message = ours.to_string();
        let through = candle_core::Error::from(ours).context("in the model").bt();
        assert!(through.to_string().contains(&message));
        assert!(matches!(Error::from(through), Error::PeerLeft { rank: 1, .. }));
    }
}
