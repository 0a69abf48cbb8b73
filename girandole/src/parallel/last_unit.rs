//! The last unit of a model in stages: it is computed together with the loss, for which a model may need less memory.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Module, Result, Tensor, bail};
use training::build::{Model, Units};

/// A model in stages. In place of its last unit it has one that passes its input on to the loss, and the model with it.
pub(super) struct WithoutLastUnit<M> {
    model: Arc<M>,
    last: PassOn<M>,
}

/// What the last stage passes on to the loss: the model that has the last unit.
pub(super) struct PassedOn<M>(Arc<Mutex<Option<Arc<M>>>>);

struct PassOn<M> {
    model: Arc<M>,
    to: PassedOn<M>,
}

impl<M> WithoutLastUnit<M> {
    pub(super) fn new(model: M, to: PassedOn<M>) -> Self {
        let model = Arc::new(model);
        Self { last: PassOn { model: model.clone(), to }, model }
    }
}

impl<M: Model> Units for WithoutLastUnit<M> {
    fn units(&self) -> Vec<&dyn Module> {
        let mut units = self.model.units();
        if let Some(last) = units.last_mut() {
            *last = &self.last;
        }
        units
    }
}

impl<M> Module for PassOn<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        *self.to.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.model.clone());
        Ok(x.clone())
    }
}

impl<M> PassedOn<M> {
    /// Returns the model whose last unit was to run last.
    ///
    /// # Errors
    /// No last unit was to run: the last stage is another rank's.
    pub(super) fn model(&self) -> Result<Arc<M>> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(model) => Ok(model.clone()),
            None => bail!("the last unit is not in this process: it belongs to another stage"),
        }
    }
}

impl<M> Default for PassedOn<M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<M> Clone for PassedOn<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
