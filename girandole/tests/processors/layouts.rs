//! A language model in a layout of two ranks.

use std::sync::Arc;

use candle_core::DType;
use girandole::Result;
use girandole::comm::Communicator;

use super::Outcome;
use super::common::{Setup, optimizer, step};

const STEPS: usize = 5;
const LOSSES: &str = "losses";

pub(super) fn train(comm: Arc<dyn Communicator>, layout: &str) -> Result<Outcome> {
    let setup = Setup { dtype: DType::F32, ..Setup::default() };
    let mut parallel = setup.parallel(comm, &layout.parse()?, None)?;
    let mut optimizer = optimizer(&parallel)?;
    let losses = (0..STEPS).map(|number| step(&mut parallel, &mut optimizer, number));
    let losses = losses.collect::<Result<Vec<f64>>>()?;
    let bytes = losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
    Ok(Outcome::from([(LOSSES.into(), bytes)]))
}

pub(super) fn losses(outcome: &Outcome) -> Vec<f64> {
    outcome[LOSSES].chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap())).collect()
}
