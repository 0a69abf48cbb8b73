//! Models of one or two units: each layout computes the same loss of them, or refuses them.

use candle_core::{Device, Module, Tensor, bail};
use candle_nn::{Activation, ModuleT, loss};
use girandole::comm::Local;
use girandole::ops::Dropout;
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::{InitialWeights, Layout, Parallel, ParallelConfig};

/// A model that mixes positions.
struct Mixing(Unit<Linear>);

impl Units for Mixing {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.0]
    }
}

impl Model for Mixing {
    fn output_loss(output: &Tensor, _: &Tensor) -> candle_core::Result<Tensor> {
        output.mean(1)?.sqr()?.mean_all()
    }
}

/// A layer, and a unit without parameters.
struct Rectified(Unit<Linear>, Unit<Activation>);

impl Units for Rectified {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.0, &self.1]
    }
}

impl Model for Rectified {
    fn output_loss(output: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        loss::mse(output, targets)
    }
}

/// A model that computes its last unit and the loss together, with dropout between them.
struct Together(Unit<Linear>, Unit<Linear>, Dropout);

impl Units for Together {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.0, &self.1]
    }
}

impl Model for Together {
    fn output_loss(_: &Tensor, _: &Tensor) -> candle_core::Result<Tensor> {
        bail!("the loss is not computed from the output")
    }

    fn last_unit_loss(&self, x: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        self.1.run(|layer| loss::mse(&self.2.forward_t(&layer.forward(x)?, true)?, targets))
    }
}

/// Asserts that the loss of a step is the same in all layouts.
fn assert_same_loss<M: Model + Send + Sync + 'static>(
    build: impl Fn(&Builder) -> candle_core::Result<M> + Copy + Send + Sync + 'static,
) {
    let loss = |layout: &str| {
        let layout: Layout = layout.parse().unwrap();
        let losses = Local::run_shared(layout.ranks(), |comm| {
            let all = Tensor::arange(0f32, 16f32, &Device::Cpu)?.reshape((4, 4))?;
            // Rows are assigned to ranks in turn.
            let own: Vec<u32> =
                (0..4).filter(|row| *row as usize % layout.data_ranks() == comm.rank()).collect();
            let x = match layout.data_ranks() {
                1 => all,
                _ => all.index_select(&Tensor::new(own, &Device::Cpu)?, 0)?,
            };
            let example = (layout.pp > 1).then(|| x.clone());
            let settings = ParallelConfig { example, ..ParallelConfig::default() };
            let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(1), &settings, build)?;
            Ok(parallel.step(&x, &(&x * 0.5)?)?.loss)
        });
        losses.unwrap()[0]
    };
    let expected = loss("");
    for layout in ["dp=2", "shard=2", "pp=2"] {
        let got = loss(layout);
        assert!((got - expected).abs() < 1e-5 * expected.abs(), "{layout}: {got} and {expected}");
    }
}

#[test]
fn a_unit_without_parameters_is_in_every_layout() {
    assert_same_loss(|builder| {
        let layer = LinearConfig::new(4, 4, Division::Whole);
        let layer = builder.unit("layer", |part| part.pp("layer").linear(&layer))?;
        Ok(Rectified(layer, builder.unit("act", |_| Ok(Activation::Relu))?))
    });
}

#[test]
fn a_model_may_compute_its_last_unit_and_the_loss_together() {
    assert_same_loss(|builder| {
        let layer = LinearConfig::new(4, 4, Division::Whole);
        let unit = |name: &str| builder.unit(name, |part| part.pp(name).linear(&layer));
        Ok(Together(unit("first")?, unit("last")?, Dropout::by_row(0.5, "last")?))
    });
}

#[test]
fn sequences_of_a_model_that_may_mix_them_are_not_divided() {
    let said = Local::run_shared(2, |comm| {
        let settings = ParallelConfig { sequence_parallel: true, ..ParallelConfig::default() };
        let layer = LinearConfig::new(4, 4, Division::Outputs);
        let build = move |builder: &Builder| Ok(Mixing(builder.unit("all", |part| part.linear(&layer))?));
        let built = Parallel::new(comm, &"tp=2".parse()?, InitialWeights::seed(1), &settings, build);
        Ok(built.map(drop).unwrap_err().to_string())
    });
    assert!(said.unwrap().iter().all(|said| said.contains("Model::divides_sequences")));
}
