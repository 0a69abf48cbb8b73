//! A model of a user's own: its head is tied to the embedding, whose vocabulary is not divided evenly, and has more layers.

use std::io::Write;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Init, Optimizer};
use girandole::comm::{Communicator, Local};
use girandole::ops::{RmsNorm, cross_entropy, rms_norm};
use girandole::trainer::{self, Data};
use girandole::training::build::{
    Builder, Division, Layers, Linear, LinearConfig, Model, Unit, Units, Vocabulary,
};
use girandole::training::{Adam, AdamConfig, AuditConfig, OnMissingGradient};
use girandole::{Batch, InitialWeights, Layout, Parallel, ParallelConfig};
use tracing_subscriber::fmt::MakeWriter;

const TOKENS: usize = 11;
const FEATURES: usize = 8;
const LEN: usize = 6;
const ROWS: usize = 8;

struct Embed {
    table: Arc<dyn Vocabulary>,
    positions: Tensor,
    layers: Arc<dyn Layers>,
}

impl Module for Embed {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let own = self.layers.positions(x.dim(1)?)?;
        self.table.embed(x)?.broadcast_add(&self.positions.narrow(0, own.start, own.len())?)
    }
}

struct Block {
    up: Linear,
    down: Linear,
    /// A parameter without elements.
    empty: Tensor,
    /// State: the number of forward passes.
    passes: Tensor,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Var::from_tensor(&self.passes)?.set(&(&self.passes + 1.0)?)?;
        let y = x + self.down.forward(&self.up.forward(x)?.tanh()?)?;
        y?.broadcast_add(&self.empty.sum_all()?)
    }
}

struct Head {
    table: Arc<dyn Vocabulary>,
    norm: RmsNorm,
    /// Drawn after the table.
    mix: Linear,
}

impl Module for Head {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.table.logits(&self.mix.forward(&self.norm.forward(x)?)?)
    }
}

struct Net {
    embed: Unit<Embed>,
    block: Unit<Block>,
    head: Unit<Head>,
}

impl Net {
    fn new(builder: &Builder) -> Result<Self> {
        let embed = builder.unit("embed", |part| {
            let part = part.pp("embed");
            let init = Init::Randn { mean: 0.0, stdev: 0.2 };
            let positions = part.whole().get_with_hints((LEN, FEATURES), "positions", init)?;
            Ok(Embed { table: part.vocabulary(TOKENS, FEATURES)?, positions, layers: part.layers().clone() })
        })?;
        let block = builder.unit("block", |part| {
            let part = part.pp("block");
            let up = LinearConfig::new(FEATURES, 2 * FEATURES, Division::Outputs).with_bias(true);
            let down = LinearConfig::new(2 * FEATURES, FEATURES, Division::Inputs).with_bias(true);
            let empty = part.whole().get((0, FEATURES), "empty")?;
            let passes = part.whole().get_with_hints(1, "passes", Init::Const(0.0))?;
            Ok(Block { up: part.pp("up").linear(&up)?, down: part.pp("down").linear(&down)?, empty, passes })
        })?;
        let head = builder.unit_sharing("head", &embed, |part, embed| {
            let part = part.pp("head");
            let table = match embed {
                Some(embed) => embed.table.clone(),
                None => part.vocabulary(TOKENS, FEATURES)?,
            };
            let norm = rms_norm(FEATURES, 1e-5, part.pp("norm").whole())?;
            let mix = part.pp("mix").linear(&LinearConfig::new(FEATURES, FEATURES, Division::Whole))?;
            Ok(Head { table, norm, mix })
        })?;
        Ok(Self { embed, block, head })
    }
}

impl Units for Net {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.embed, &self.block, &self.head]
    }
}

impl Model for Net {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy(&output.reshape(((), TOKENS))?, &targets.flatten_all()?, None)
    }

    fn ties(&self) -> Vec<(String, String)> {
        vec![("embed.weight".into(), "head.weight".into())]
    }

    fn divides_sequences() -> bool {
        true
    }
}

fn parallel(
    comm: Arc<dyn Communicator>,
    layout: &str,
    config: &ParallelConfig,
) -> girandole::Result<Parallel<Net>> {
    let layout: Layout = layout.parse()?;
    let mut config = ParallelConfig { dtype: DType::F64, ..config.clone() };
    config.ddp.buffers.push("passes".into());
    config.fsdp.buffers.push("passes".into());
    Parallel::new(comm, &layout, InitialWeights::seed(3), &config, Net::new)
}

/// Returns the losses of some steps.
fn losses(comm: Arc<dyn Communicator>, layout: &str, config: &ParallelConfig) -> girandole::Result<Vec<f64>> {
    let mut parallel = parallel(comm, layout, config)?;
    let adam = AdamConfig { learning_rate: 0.02, ..AdamConfig::default() };
    let mut adam = Adam::named(parallel.named_vars(), adam)?;
    let data = parallel.data_ranks();
    let own = (data.rank()..ROWS).step_by(data.world_size());
    let numbers: Vec<usize> = own.flat_map(|row| (0..LEN).map(move |place| row * LEN + place)).collect();
    let shape = (numbers.len() / LEN, LEN);
    let tokens = numbers.iter().map(|number| (number * 7 % TOKENS) as u32).collect();
    let tokens = Tensor::from_vec::<_, u32>(tokens, shape, &Device::Cpu)?;
    let targets = numbers.iter().map(|number| (number * 5 % TOKENS) as i64).collect();
    let targets = Tensor::from_vec::<_, i64>(targets, shape, &Device::Cpu)?;
    let step = |_| -> girandole::Result<f64> {
        let step = parallel.step(&tokens, &targets)?;
        adam.step(&step.grads)?;
        Ok(step.loss)
    };
    (0..3).map(step).collect()
}

/// The forward pass that finds out the shapes of stages leaves no trace.
#[test]
fn its_state_is_new_when_it_is_built() {
    for layout in ["", "dp=2", "shard=2", "pp=2", "pp=3"] {
        let ranks = layout.parse::<Layout>().unwrap().ranks();
        let built = Local::run_shared(ranks, |comm| {
            let example = Some(Tensor::zeros((ROWS, LEN), DType::U32, &Device::Cpu)?);
            let buffers =
                parallel(comm, layout, &ParallelConfig { example, ..Default::default() })?.buffers();
            let values = buffers.iter().map(|(_, var)| var.to_vec1::<f64>()).collect::<Result<Vec<_>>>();
            Ok(values?.concat())
        });
        assert_eq!(
            built.unwrap().concat(),
            vec![0.0; if layout.contains("pp") { 1 } else { ranks }],
            "{layout}"
        );
    }
}

fn compare(layouts: &[&str], config: &ParallelConfig) {
    let of = |layout: &str| {
        let ranks = layout.parse::<Layout>().unwrap().ranks();
        Local::run_shared(ranks, |comm| Ok(losses(comm, layout, config)?)).unwrap().remove(0)
    };
    let expected = of("");
    for layout in layouts {
        let got = of(layout);
        let gap = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < 1e-10, "{layout}: {got:?}, expected {expected:?}");
    }
}

#[test]
fn it_learns_the_same_in_every_layout() {
    let layouts = ["dp=2", "shard=2", "tp=2", "pp=2", "pp=3", "pp=2,shard=2", "pp=2,tp=2", "pp=2,dp=2"];
    compare(&layouts, &ParallelConfig::default());
}

#[test]
fn stages_take_the_first_batch_as_their_example_and_refuse_others() {
    for layout in ["pp=2", "pp=2,dp=2"] {
        let ranks = layout.parse::<Layout>().unwrap().ranks();
        let said = Local::run_shared(ranks, |comm| {
            let mut parallel = parallel(comm, layout, &ParallelConfig::default())?;
            let batch = |rows: usize| {
                let tokens = Tensor::zeros((rows, LEN), DType::U32, &Device::Cpu)?;
                Ok::<_, girandole::Error>((tokens.clone(), tokens.to_dtype(DType::I64)?))
            };
            let (tokens, targets) = batch(2)?;
            let evaluated = parallel.evaluate(&tokens, &targets)?.loss;
            let first = parallel.step(&tokens, &targets)?.loss;
            assert!((evaluated - first).abs() < 1e-10, "{evaluated}, {first}");
            let (tokens, targets) = batch(3)?;
            Ok(parallel.step(&tokens, &targets).unwrap_err().to_string())
        });
        for said in said.unwrap() {
            assert!(
                said.contains("stages have room for 2 rows of each of 1 micro-batches"),
                "{layout}: {said}"
            );
        }
    }
    let unequal = Local::run_shared(4, |comm| {
        let mut parallel = parallel(comm.clone(), "pp=2,dp=2", &ParallelConfig::default())?;
        let rows = 1 + parallel.data_ranks().rank();
        let tokens = Tensor::zeros((rows, LEN), DType::U32, &Device::Cpu)?;
        Ok(parallel.step(&tokens, &tokens.to_dtype(DType::I64)?).unwrap_err().to_string())
    });
    for said in unequal.unwrap() {
        assert!(said.contains("the number of rows of the example is 2 on rank"), "{said}");
    }
}

#[test]
fn it_learns_the_same_where_the_tied_table_is_not_trained() {
    let config = ParallelConfig {
        is_trained: Some(Arc::new(|name: &str| name.starts_with("block"))),
        ..ParallelConfig::default()
    };
    compare(&["tp=2", "pp=2", "pp=3", "pp=2,shard=2", "pp=2,tp=2"], &config);
}

#[test]
fn it_learns_the_same_with_divided_sequences() {
    let config = ParallelConfig { sequence_parallel: true, ..ParallelConfig::default() };
    compare(&["tp=2", "shard=2,tp=2", "shard=3,tp=2", "pp=2,shard=2,tp=2"], &config);
}

/// Rows of whose targets all count.
struct Counted;

impl Data for Counted {
    fn rows(&self) -> usize {
        5
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let numbers = || rows.iter().flat_map(|row| (0..LEN).map(move |place| row * LEN + place));
        let shape = (rows.len(), LEN);
        let tokens = Tensor::from_iter(numbers().map(|number| (number * 7 % TOKENS) as u32), device)?;
        let targets = Tensor::from_iter(numbers().map(|number| (number * 5 % TOKENS) as i64), device)?;
        Ok((tokens.reshape(shape)?, targets.reshape(shape)?).into())
    }
}

/// Rows that fill a batch do not count, although the model has no targets that would not.
#[test]
fn it_is_evaluated_on_the_rows_that_there_are() {
    let of = |layout: &str, size: usize| {
        let ranks = layout.parse::<Layout>().unwrap().ranks();
        let evaluated = Local::run_shared(ranks, |comm| {
            let mut parallel = parallel(comm, layout, &ParallelConfig::default())?;
            Ok(trainer::evaluate(&mut parallel, &Counted, 64, size)?)
        });
        evaluated.unwrap().remove(0)
    };
    let expected = of("", 5);
    for layout in ["", "dp=2", "shard=3", "tp=2", "pp=2", "pp=3", "pp=2,shard=2", "pp=2,dp=2"] {
        for size in [2, ROWS] {
            let found = of(layout, size);
            let gap = (found.loss - expected.loss).abs();
            assert!(gap < 1e-10 && found.targets == 5 * LEN, "{layout}, {size}: {found:?}, {expected:?}");
        }
    }
}

/// A chain of layers, of which `listed` are told.
struct Chain {
    layers: Vec<Unit<Linear>>,
    listed: usize,
}

impl Units for Chain {
    fn units(&self) -> Vec<&dyn Module> {
        self.layers[..self.listed].iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Chain {
    fn output_loss(output: &Tensor, _: &Tensor) -> Result<Tensor> {
        output.sum_all()
    }
}

#[test]
fn a_unit_twice_and_a_model_without_units_are_refused_in_every_layout() {
    for layout in ["", "dp=2", "shard=2", "tp=2", "pp=2"] {
        for (names, listed, expected) in [
            (["a", "a"], 2, "two units are called a: give each a name and parameters of its own"),
            (["a", "b"], 0, "the model: got no units; make its parts with Builder::unit, and give them in"),
        ] {
            let build = move |builder: &Builder| {
                let config = LinearConfig::new(4, 4, Division::Whole);
                let layer = |name: &&str| builder.unit(name, |part| part.pp(name).linear(&config));
                Ok(Chain { layers: names.iter().map(layer).collect::<Result<_>>()?, listed })
            };
            let layout: Layout = layout.parse().unwrap();
            let said = Local::run_shared(layout.ranks(), |comm| {
                let config = ParallelConfig {
                    example: Some(Tensor::zeros((1, 4), DType::F32, &Device::Cpu)?),
                    ..ParallelConfig::default()
                };
                let built = Parallel::new(comm, &layout, InitialWeights::seed(0), &config, build);
                Ok(built.err().map(|error| error.to_string()))
            });
            for said in said.unwrap() {
                assert!(said.as_ref().is_some_and(|said| said.starts_with(expected)), "{layout}: {said:?}");
            }
        }
    }
}

#[test]
fn a_layer_that_cannot_be_divided_is_named_with_the_axis() {
    let built = |layout: &str, division, inputs, outputs, heads| {
        let build = move |builder: &Builder| {
            let layer = builder.unit("a", |part| {
                let part = part.pp("a").pp("up");
                part.share("heads", heads)?;
                part.linear(&LinearConfig::new(inputs, outputs, division))
            })?;
            Ok(Chain { layers: vec![layer], listed: 1 })
        };
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let (weights, config) = (InitialWeights::seed(0), ParallelConfig::default());
            Ok(Parallel::new(comm, &layout, weights, &config, build).err().map(|error| error.to_string()))
        });
        said.unwrap().remove(0).unwrap()
    };
    for layout in ["tp=3", "shard=2,tp=3"] {
        let axis = "3 tensor-parallel ranks (tp=3 of a layout)";
        for (division, line) in [
            (Division::Outputs, "the rows of a.up.weight: 8 cannot be divided into 3 equal parts for"),
            (Division::Inputs, "the columns of a.up.weight: 4 cannot be divided into 3 equal parts for"),
        ] {
            let said = built(layout, division, 4, 8, 3);
            assert!(said.contains(&format!("{line} {axis}; give a multiple of 3")), "{said}");
        }
        let said = built(layout, Division::Outputs, 3, 3, 4);
        assert!(said.contains(&format!("heads of a.up: 4 cannot be divided over {axis}")), "{said}");
    }
}

/// A chain whose second layer detaches its input, as candle's operations without backward do.
struct Cut(Vec<Unit<Link>>);

struct Link {
    layer: Linear,
    cuts: bool,
}

impl Module for Link {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.forward(&if self.cuts { x.detach() } else { x.clone() })
    }
}

impl Units for Cut {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Cut {
    fn output_loss(output: &Tensor, _: &Tensor) -> Result<Tensor> {
        output.sqr()?.mean_all()
    }
}

/// Runs two steps of a chain of three layers, and returns each rank's error, and what all have warned of.
fn steps_of_cut(layout: &str, audit: &AuditConfig) -> (Vec<Option<String>>, String) {
    let layout: Layout = layout.parse().unwrap();
    let build = |builder: &Builder| {
        let config = LinearConfig::new(4, 4, Division::Whole).with_bias(true);
        let link = |name: &str| {
            builder.unit(name, |part| Ok(Link { layer: part.pp(name).linear(&config)?, cuts: name == "b" }))
        };
        Ok(Cut(["a", "b", "c"].into_iter().map(link).collect::<Result<_>>()?))
    };
    let warned = Mutex::new(Vec::new());
    let failed = Local::run_shared(layout.ranks(), |comm| {
        let own = Arc::<Mutex<Vec<u8>>>::default();
        let log = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false);
        let _log = tracing::subscriber::set_default(log.with_writer(Log(own.clone())).finish());
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        let config =
            ParallelConfig { example: Some(x.clone()), audit: audit.clone(), ..ParallelConfig::default() };
        let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(0), &config, build)?;
        let steps = (0..2).try_for_each(|_| parallel.step(&x, &x.zeros_like()?).map(drop));
        warned.lock().unwrap().extend_from_slice(&own.lock().unwrap());
        Ok(steps.err().map(|error| error.to_string()))
    });
    (failed.unwrap(), String::from_utf8(warned.into_inner().unwrap()).unwrap())
}

/// Where a rank's thread logs to.
struct Log(Arc<Mutex<Vec<u8>>>);

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self(self.0.clone())
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn parameters_without_a_gradient_are_named_in_every_layout() {
    // While there is only one dispatcher, `tracing` asks the thread that logs first, which may be another test's, and takes its answer
    // for all.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let strict = AuditConfig { on_missing: OnMissingGradient::Fail, ..AuditConfig::default() };
    for layout in ["", "tp=2", "dp=2", "shard=2", "pp=2", "pp=3", "pp=2,dp=2", "pp=2,shard=2", "pp=2,tp=2"] {
        let is_said = |line: &str| {
            assert!(line.contains("2 of 6 parameters have no gradient: "), "{layout}: {line}");
            assert!(line.contains("a.weight") && line.contains("a.bias"), "{layout}: {line}");
            assert!(!line.contains("b.weight") && !line.contains("c.weight"), "{layout}: {line}");
        };
        let (failed, warned) = steps_of_cut(layout, &strict);
        failed.into_iter().for_each(|line| is_said(&line.expect("no rank may go on")));
        assert_eq!(warned, "", "{layout}");
        let (failed, warned) = steps_of_cut(layout, &AuditConfig::default());
        assert!(failed.iter().all(Option::is_none), "{layout}");
        is_said(&warned);
        assert_eq!(warned.matches("WARN").count(), 1, "{layout}: {warned}");
        let frozen = AuditConfig { frozen: vec!["a".into()], ..strict.clone() };
        let (failed, warned) = steps_of_cut(layout, &frozen);
        assert!(failed.iter().all(Option::is_none) && warned.is_empty(), "{layout}: {warned}");
    }
}
