//! Loads one batch: its samples, then collate. A panic in either becomes an error.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::allocation::reserved;
use crate::{BoxError, Dataset, SamplerError};

/// A function that combines samples into a batch.
pub(crate) type Collate<T, B> = dyn Fn(Vec<T>) -> Result<B, BoxError> + Send + Sync;

/// The result of loading a batch, and its number of samples.
pub(crate) struct Loaded<B> {
    pub(crate) batch: Result<B, SamplerError>,
    pub(crate) samples: usize,
}

/// Loads batches; shared by the workers.
pub(crate) struct Fetch<D: Dataset, B> {
    pub(crate) dataset: Arc<D>,
    pub(crate) collate: Arc<Collate<D::Item, B>>,
}

impl<D: Dataset, B> Clone for Fetch<D, B> {
    fn clone(&self) -> Self {
        Self { dataset: Arc::clone(&self.dataset), collate: Arc::clone(&self.collate) }
    }
}

impl<D: Dataset, B> Fetch<D, B> {
    /// Loads a batch. Returns `None` if `stop`, called before each sample, says that the batch is no longer needed.
    pub(crate) fn fetch(
        &self,
        batch: usize,
        indices: &[usize],
        stop: impl Fn() -> bool,
    ) -> Option<Result<B, SamplerError>> {
        let loading = Cell::new(None);
        let loaded = catch_unwind(AssertUnwindSafe(|| self.load(batch, indices, stop, &loading)));
        loaded.unwrap_or_else(|payload| {
            let message = panic_message(payload);
            Some(Err(match loading.get() {
                Some(index) => SamplerError::SamplePanicked { batch, index, message },
                None => SamplerError::CollatePanicked { batch, message },
            }))
        })
    }

    fn load(
        &self,
        batch: usize,
        indices: &[usize],
        stop: impl Fn() -> bool,
        loading: &Cell<Option<usize>>,
    ) -> Option<Result<B, SamplerError>> {
        let mut items = match reserved(indices.len(), "a batch's samples") {
            Ok(items) => items,
            Err(error) => return Some(Err(error)),
        };
        for &index in indices {
            if stop() {
                return None;
            }
            loading.set(Some(index));
            match self.dataset.get(index) {
                Ok(item) => items.push(item),
                Err(cause) => return Some(Err(SamplerError::LoadSample { batch, index, cause })),
            }
        }
        loading.set(None);
        Some((self.collate)(items).map_err(|cause| SamplerError::Collate { batch, cause }))
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let message = if let Some(message) = payload.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = payload.downcast_ref::<String>() {
        message.clone()
    } else {
        "(no message)".to_owned()
    };
    // A payload may have any type, and its destructor may panic as well.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    message
}
