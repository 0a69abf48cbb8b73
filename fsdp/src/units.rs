//! Adapter for models written with [`training::build`]: their units become FSDP units.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use comm::internal::carried_as;
use training::build::{Builder, RunUnit, UnitPlace, UnitSource};

use crate::{Error, Unit, UnitBuilder, UnitConfig};

impl From<UnitBuilder<'static>> for Builder {
    /// Makes each unit of the model a [`Unit`] of [`crate::Fsdp`].
    fn from(units: UnitBuilder<'static>) -> Self {
        Self::of_units(Arc::new(units))
    }
}

impl UnitSource for UnitBuilder<'static> {
    fn unit(
        &self,
        name: &str,
        build: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>,
    ) -> Result<UnitPlace> {
        match self.named_unit(name.into(), &UnitConfig::default(), build) {
            Ok(unit) => Ok(UnitPlace::Gathered(Arc::new(unit))),
            // Without parameters there is nothing to gather.
            Err(error) if matches!(carried_as(&error), Some(Error::EmptyUnit { .. })) => Ok(UnitPlace::Here),
            Err(error) => Err(error),
        }
    }
}

impl RunUnit for Unit<()> {
    fn input(&self, x: &Tensor) -> Result<Tensor> {
        self.cast(x)
    }

    fn run(&self, body: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor> {
        Unit::run(self, |()| body())
    }
}
