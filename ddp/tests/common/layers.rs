//! A model with a probe: a hook that runs when backward reaches the first layer.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use ddp::{Ddp, DdpConfig};

use super::{Comm, builder, values};

pub(crate) const LAYERS: usize = 4;
const WIDTH: usize = 6;
/// Configuration with a separate bucket for every parameter.
pub(crate) fn apart() -> DdpConfig {
    DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..Default::default() }
}

/// The identity operation, which calls a function in backward.
struct Probe<F>(F);

impl<F: Fn() -> candle_core::Result<()>> CustomOp1 for Probe<F> {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)().map(|()| Some(grad.clone()))
    }
}

/// Several layers, and a head that not every forward pass uses.
pub(crate) struct Layers {
    layers: Vec<Linear>,
    head: Linear,
}

impl Layers {
    pub(crate) fn ddp(comm: Comm, config: &DdpConfig) -> ddp::Result<Ddp<Self>> {
        let mut parameters = vec![];
        let names: Vec<String> = (0..LAYERS).map(|index| index.to_string()).chain(["head".into()]).collect();
        let full: Vec<String> =
            names.iter().flat_map(|name| [format!("{name}.weight"), format!("{name}.bias")]).collect();
        for (index, name) in full.iter().enumerate() {
            parameters
                .push((name.as_str(), if index % 2 == 0 { &[WIDTH, WIDTH] as &[usize] } else { &[WIDTH] }));
        }
        let vb = builder(1, &parameters, DType::F32);
        Ddp::new(comm, vb, config, |vb: VarBuilder<'static>| {
            let layer = |name: &String| linear(WIDTH, WIDTH, vb.pp(name));
            let layers = names[..LAYERS].iter().map(layer).collect::<candle_core::Result<_>>()?;
            Ok(Self { layers, head: layer(&names[LAYERS])? })
        })
    }

    /// `probe` runs when backward has passed all layers but the first.
    pub(crate) fn loss<F>(&self, seed: u64, with_head: bool, probe: F) -> candle_core::Result<Tensor>
    where
        F: Fn() -> candle_core::Result<()> + Send + Sync + 'static,
    {
        let mut output = self.layers[0].forward(&values(seed, &[3, WIDTH], DType::F32))?;
        output = output.apply_op1(Probe(probe))?;
        for layer in &self.layers[1..] {
            output = layer.forward(&output.tanh()?)?;
        }
        let output = if with_head { self.head.forward(&output)? } else { output };
        output.sqr()?.mean_all()
    }
}
