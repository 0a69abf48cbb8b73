//! Parameters and losses after training in stages equal those of a single process, for every schedule.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{BatchNorm, Init, ModuleT, VarBuilder, VarMap, batch_norm};
use comm::Local;
use pipeline::{Cost, Modules, Pipeline, PipelineConfig, ScheduleKind, Split};

use crate::common::{ROWS, WIDTH, alone, assert_equal, in_stages, loss, values};

const BLOCKS: usize = 3;

fn check(config: &PipelineConfig, ranks: usize) {
    let what = format!("{}, {ranks} ranks, {} micro-batches", config.schedule, config.micro_batches);
    let (expected, expected_losses) = alone(BLOCKS, crate::common::ROWS * config.micro_batches);
    let results = Local::run_shared(ranks, |comm| Ok(in_stages(comm, BLOCKS, config)?)).unwrap();
    let mut got: crate::common::Trained =
        results.iter().flat_map(|(trained, _, _)| trained.clone()).collect();
    got.sort_by(|a, b| a.0.cmp(&b.0));
    assert_equal(&got, &expected, &what);
    let losses: Vec<f32> = results.iter().flat_map(|(_, losses, _)| losses.clone()).collect();
    assert_eq!(losses.len(), expected_losses.len(), "{what}");
    for (got, expected) in losses.iter().zip(&expected_losses) {
        assert!(
            (got - expected).abs() < 1e-5 * expected.abs(),
            "{what}: loss {got}, in one process {expected}"
        );
    }
    // The number of live activations equals the one that the checker computes.
    let schedule =
        pipeline::Schedule::of(config.schedule, ranks, config.stages_per_rank(), config.micro_batches);
    for ((_, _, alive), planned) in results.iter().zip(schedule.unwrap().live()) {
        assert_eq!(alive, planned, "{what}");
    }
}

fn all_sizes(schedule: ScheduleKind) {
    for ranks in 1..=4 {
        for micro_batches in [1, 2, 3, 4, 5, 8, 16] {
            check(&PipelineConfig { schedule, micro_batches, ..PipelineConfig::default() }, ranks);
        }
    }
}

#[test]
fn naive() {
    all_sizes(ScheduleKind::Naive);
}

#[test]
fn gpipe() {
    all_sizes(ScheduleKind::GPipe);
}

#[test]
fn one_f_one_b() {
    all_sizes(ScheduleKind::OneFOneB);
}

#[test]
fn interleaved() {
    all_sizes(ScheduleKind::Interleaved);
}

#[test]
fn looped_bfs() {
    all_sizes(ScheduleKind::LoopedBfs);
}

#[test]
fn zb_h1() {
    all_sizes(ScheduleKind::ZbH1);
}

#[test]
fn zb_v() {
    all_sizes(ScheduleKind::ZbV);
}

#[test]
fn other_cuts_and_more_stages() {
    let base = PipelineConfig { micro_batches: 4, ..PipelineConfig::default() };
    for split in
        [Split::at(["blocks.0.act"]), Split::at(["blocks.2.norm"]), Split::Balanced(Cost::ForwardTime)]
    {
        check(&PipelineConfig { split, ..base.clone() }, 2);
    }
    for schedule in [ScheduleKind::Interleaved, ScheduleKind::LoopedBfs] {
        for (ranks, stages) in [(1, 3), (2, 3), (3, 4), (2, 6)] {
            let config = PipelineConfig { schedule, stages_per_rank: Some(stages), ..base.clone() };
            check(&config, ranks);
        }
    }
}

/// A norm that updates its statistics, and counts, in each forward pass.
struct Counted(BatchNorm, Tensor);

impl Counted {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let calls = vb.get_with_hints(1, "calls", Init::Const(0.0))?;
        Ok(Self(batch_norm(WIDTH, 1e-5, vb)?, calls))
    }
}

impl ModuleT for Counted {
    fn forward_t(&self, x: &Tensor, _train: bool) -> Result<Tensor> {
        Var::from_tensor(&self.1)?.set(&(&self.1 + 1.0)?)?;
        self.0.forward_t(x, true)
    }
}

/// What a new pipeline finds out about its stages leaves no trace in their state.
#[test]
fn a_new_pipeline_has_the_state_that_it_was_built_with() {
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
    let (ones, zeros) = (vec![1.0; WIDTH], vec![0.0; WIDTH]);
    let weights = |map: &VarMap| VarBuilder::from_varmap(map, DType::F64, &Device::Cpu);
    let results = Local::run_shared(2, |comm| {
        let modules = Modules::new().module("a", Counted::new).module("b", Counted::new).buffers(&["calls"]);
        let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
        let mut pipeline = Pipeline::new(comm, &modules, &weights, &example, loss, &config)?;
        let all = |of: &Pipeline| values(&[&of.named_vars(), of.buffers()].concat());
        let built = all(&pipeline);
        let batch = Tensor::zeros((2 * ROWS, WIDTH), DType::F64, &Device::Cpu)?;
        pipeline.step(Some(&batch), Some(&batch))?;
        Ok((built, all(&pipeline)))
    });
    for (built, trained) in results.unwrap() {
        for (name, value) in built {
            let expected = match name.rsplit('.').next() {
                Some("calls") => &vec![0.0],
                Some("weight" | "running_var") => &ones,
                _ => &zeros,
            };
            assert_eq!(value, *expected, "{name}");
        }
        let calls = trained.iter().find(|(name, _)| name.ends_with("calls")).unwrap();
        assert_eq!(calls.1, [2.0]);
    }
}
