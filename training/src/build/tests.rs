//! Tests of the builder with units: shared parameters, frozen ones, and tokens outside the vocabulary.

use std::sync::Mutex;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::VarMap;

use super::*;

fn vb(vars: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu)
}

/// A strategy that has only the units in `own`, and records which it runs.
struct Some {
    vb: VarBuilder<'static>,
    own: &'static [&'static str],
    ran: Arc<Mutex<Vec<String>>>,
}

struct Noted(String, Arc<Mutex<Vec<String>>>);

impl RunUnit for Noted {
    fn run(&self, body: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor> {
        self.1.lock().unwrap().push(self.0.clone());
        body()
    }
}

impl UnitSource for Some {
    fn unit(
        &self,
        name: &str,
        build: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>,
    ) -> Result<UnitPlace> {
        if !self.own.contains(&name) {
            return Ok(UnitPlace::OtherProcess);
        }
        build(self.vb.clone())?;
        Ok(UnitPlace::Gathered(Arc::new(Noted(name.into(), self.ran.clone()))))
    }
}

type Table = Unit<Arc<dyn Vocabulary>>;

fn model(builder: &Builder) -> Result<(Table, Table)> {
    let embed = builder.unit("embed", |part| part.pp("embed").vocabulary(5, 3))?;
    let head = builder.unit_sharing("head", &embed, |part, embed| match embed {
        Option::Some(embed) => Ok(embed.clone()),
        None => part.pp("head").vocabulary(5, 3),
    })?;
    Ok((embed, head))
}

#[test]
fn a_shared_parameter_is_one_here_and_a_copy_elsewhere() -> Result<()> {
    let tokens = Tensor::new(&[[1u32, 4]], &Device::Cpu)?;
    for (own, names, runs) in [
        (&["embed", "head"][..], &["embed.weight"][..], &["embed", "embed", "head"][..]),
        (&["head"], &["head.weight"], &["head"]),
        (&["embed"], &["embed.weight"], &["embed"]),
    ] {
        let (vars, ran) = (VarMap::new(), Arc::<Mutex<Vec<String>>>::default());
        let builder = Builder::of_units(Arc::new(Some { vb: vb(&vars), own, ran: ran.clone() }));
        let (embed, head) = model(&builder)?;
        let found: Vec<String> = crate::named_vars(&vars).into_iter().map(|(name, _)| name).collect();
        assert_eq!(found, names);
        let mut x = Tensor::ones((1, 2, 3), DType::F32, &Device::Cpu)?;
        match embed.module() {
            Option::Some(_) => x = embed.run(|table| table.embed(&tokens))?,
            None => assert!(embed.run(|table| table.embed(&tokens)).is_err()),
        }
        if head.module().is_some() {
            assert_eq!(head.run(|table| table.logits(&x))?.dims(), [1, 2, 5]);
        }
        assert_eq!(*ran.lock().unwrap(), runs);
    }
    Ok(())
}

#[test]
fn tokens_beyond_the_vocabulary_are_named() -> Result<()> {
    let (embed, _) = model(&Builder::new(vb(&VarMap::new())))?;
    let line = |tokens: Tensor| embed.run(|table| table.embed(&tokens)).unwrap_err().to_string();
    assert!(line(Tensor::new(&[0u32, 5], &Device::Cpu)?).contains("(token) 5:"));
    assert!(line(Tensor::new(&[-1i64, 2], &Device::Cpu)?).contains("(token) -1:"));
    assert!(line(Tensor::new(&[1f32], &Device::Cpu)?).contains("F32"));
    let empty = Tensor::zeros((2, 0), DType::U32, &Device::Cpu)?;
    assert_eq!(embed.run(|table| table.embed(&empty))?.dims(), [2, 0, 3]);
    Ok(())
}

#[test]
fn frozen_parameters_get_no_gradient() -> Result<()> {
    let vars = VarMap::new();
    let part = Part::new(vb(&vars).pp("a"), Arc::new(WholeLayers));
    let tensor = frozen(&part.vb.pp("b")).get_with_hints(3, "c", candle_nn::Init::Const(2.0))?;
    assert!(vars.data().lock().unwrap().contains_key("a.b.c") && !tensor.track_op());
    assert_eq!(tensor.to_vec1::<f32>()?, [2.0; 3]);
    let layer = part.pp("l").linear(&LinearConfig::new(3, 2, Division::Outputs).with_bias(true))?;
    assert_eq!(layer.forward(&tensor.reshape((1, 3))?)?.dims(), [1, 2]);
    assert_eq!((part.share("heads", 7)?, part.ranks()), (7, 1));
    Ok(())
}
