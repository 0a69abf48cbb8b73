//! Muon, which needs whole matrices, in every layout.

use crate::common::{Setup, own_rows};
use candle_core::DType;
use girandole::comm::Local;
use girandole::training::{AdamConfig, Muon, MuonConfig, StepOptimizer};
use girandole::{DistributedModel, Layout, Recompute};

const LAYOUTS: [&str; 16] = [
    "dp=2", "dp=3", "shard=2", "shard=3", "tp=2", "pp=2", "cp=2", "dp=2,shard=2", "shard=2,tp=2",
    "dp=2,tp=2", "pp=2,shard=2", "pp=2,tp=2", "pp=2,dp=2", "shard=2,cp=2", "pp=2,shard=2,tp=2", "pp=3,cp=2",
];

const STEPS: usize = 5;

/// Matrices of blocks, without routers.
fn is_hidden(name: &str) -> bool {
    let is_outside = |part: &str| ["embed_tokens", "wte", "wpe", "lm_head", "gate"].contains(&part);
    name.ends_with(".weight")
        && !name.contains("norm")
        && !name.contains("ln_")
        && !name.split('.').any(is_outside)
}

/// Losses of some steps, and the bytes that a rank sent in the last one's update.
fn train(layout: &str, setup: Setup) -> (Vec<f64>, u64) {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm: std::sync::Arc<dyn girandole::comm::Communicator>| -> girandole::Result<_> {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let adam = AdamConfig { learning_rate: 0.01, weight_decay: 0.1, ..AdamConfig::adamw() };
        let config = MuonConfig { learning_rate: 0.02, adam, ..MuonConfig::default() };
        let mut matrices = parallel.whole_matrices(is_hidden)?;
        let muon = Muon::named(parallel.named_vars(), is_hidden, config)?;
        let mut muon = muon.decaying(|name| parallel.is_matrix(name));
        let (mut losses, mut sent) = (Vec::new(), 0);
        for number in 0..STEPS {
            let mut step = parallel.step_batch(&own_rows(&parallel, number, &setup)?)?;
            parallel.clip_grad_norm(&mut step.grads, 0.5)?;
            let before = matrices.stats().bytes_sent;
            muon.step_whole(&step.grads, 1.0, &mut matrices)?;
            sent = matrices.stats().bytes_sent - before;
            losses.push(step.loss);
        }
        Ok((losses, sent))
    };
    Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap().remove(0)
}

fn agree(layouts: &[&str], setup: Setup) {
    let (expected, _) = train("", setup);
    assert!(expected[STEPS - 1] < expected[0]);
    for layout in layouts {
        let (got, _) = train(layout, setup);
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < 1e-10, "{layout}, {setup:?}: {gap:e}: {got:?}, expected {expected:?}");
    }
}

#[test]
fn every_layout_steps_as_one_process() {
    agree(&LAYOUTS, Setup::default());
    agree(&LAYOUTS, Setup { gpt2: true, ..Setup::default() });
}

#[test]
fn matrices_of_experts_are_stepped_each_by_itself() {
    let setup = Setup { experts: true, recompute: Recompute::Units, ..Setup::default() };
    let layouts = [
        "dp=2", "shard=2", "tp=2", "pp=2", "ep=2", "dp=2,ep=2", "ep=2,tp=2", "shard=2,tp=2", "pp=2,ep=2",
        "shard=2,ep=2",
    ];
    agree(&layouts, setup);
}

/// Each rank sends its parts of the matrices that others own, and the others' parts of its results: half of what a reduce-scatter
/// and an all-gather send, if all are divided.
#[test]
fn the_exchange_is_at_most_a_reduce_scatter_and_an_all_gather() {
    let setup = Setup { dtype: DType::F32, ..Setup::default() };
    // Of 6 blocks: queries, keys, values, output; gate, up, down; of 32 by 32 each.
    let most = 6 * 7 * 32 * 32 * 4 / 2;
    let sent = |layout| train(layout, setup).1;
    // Shards are cut through few matrices: most are whole on one rank.
    assert!((1..most / 4).contains(&sent("shard=2")));
    // Copies need nothing of each other but results.
    for layout in ["tp=2", "dp=2"] {
        let sent = sent(layout);
        assert!(sent > most / 2 && sent <= most + 4096, "{layout}: {sent} sent, at most {most}");
    }
}
