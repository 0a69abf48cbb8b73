//! Forward through pipeline stages: rows of any length, with the same result as on one rank.

use std::sync::Arc;

use crate::common::{Setup, optimizer, own_batch};
use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use girandole::Layout;
use girandole::comm::{Communicator, Local};

/// Returns the logits of the last token of some rows after a step, on all ranks.
fn logits(setup: Setup, layout: &str) -> Vec<Vec<f64>> {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<Vec<f64>> {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let mut adam = optimizer(&parallel)?;
        let (tokens, targets) = own_batch(&parallel, 0)?;
        let step = parallel.step(&tokens, &targets)?;
        adam.step(&step.grads)?;
        let mut all = Vec::new();
        for len in [1, 5, 3] {
            let row = Tensor::arange(3u32, 3 + len as u32, &Device::Cpu)?.unsqueeze(0)?;
            let last = |logits: &Tensor| logits.narrow(1, len - 1, 1)?.flatten_all();
            let logits = match parallel.stages()? {
                Some(mut stages) => stages.forward(&row, last)?,
                None => last(&parallel.model()?.unwrap().logits(&row)?)?,
            };
            all.extend(logits.to_vec1::<f64>()?);
        }
        // Further steps are possible.
        parallel.step(&tokens, &targets)?;
        Ok(all)
    };
    Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap()
}

#[test]
fn they_give_what_one_rank_gives_on_all_ranks() {
    let setup = Setup { dtype: DType::F64, tied: true, ..Setup::default() };
    let expected = logits(setup, "").remove(0);
    assert_eq!(expected.len(), 3 * 48);
    let layouts = [("pp=2", false), ("pp=4,dp=2", false), ("pp=2,shard=2", false), ("pp=2,tp=2", true)];
    for (layout, sequence_parallel) in layouts {
        for got in logits(Setup { sequence_parallel, ..setup }, layout) {
            let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(got.len() == expected.len() && gap < 1e-9, "{layout}: {gap}");
        }
    }
}
