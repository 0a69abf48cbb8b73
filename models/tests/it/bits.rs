//! Folders that transformers saved with bitsandbytes in 4 and 8 bits: `fixtures/make_bits.py` makes them.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::common::{Expected, Trainer, assert_losses, folder, gap};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Init, VarMap};
use models::{CausalLm, FolderConfig, FolderWriter, Lora, LoraConfig, MergedWeights, Weights};
use ops::quantized::Format;
use training::build::Builder;
use training::{clip_grad_norm, load_tensors, named_vars};

const FOLDERS: [&str; 6] = ["nf4", "nf4-double", "nf4-odd", "fp4", "int8", "gpt2"];

fn logits(weights: &Weights, lora: Option<&Lora>, tokens: &Tensor) -> Tensor {
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let builder = lora.map_or_else(|| builder.clone(), |lora| lora.adapt(builder.clone()));
    CausalLm::new(weights.config(), &builder).unwrap().logits(tokens).unwrap()
}

fn on_its_base(weights: &Weights) -> Lora {
    let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, weights.config()).unwrap();
    lora.quantized_as(&weights.formats()).unwrap()
}

/// The logits are those of transformers, and of its widened weights, whether ours are widened when read or as they are multiplied by.
#[test]
fn logits_are_those_of_transformers() {
    for name in FOLDERS {
        let (weights, expected) =
            (Weights::folder(&folder("bits").join(name)).unwrap(), Expected::of(&format!("bits/{name}")));
        let (tokens, theirs) = (expected.get("tokens"), expected.get("logits"));
        let lora = on_its_base(&weights);
        let held = match name {
            "nf4" => Some(Format::Nf4Wide),
            "nf4-double" | "gpt2" => Some(Format::Nf4),
            "int8" => Some(Format::Int8),
            _ => None,
        };
        assert_eq!(
            (weights.bits(), lora.base_format()),
            (Some(if name == "int8" { 8 } else { 4 }), held),
            "{name}"
        );
        // Activations are in 8 bits there as well.
        let most = if name == "int8" { 0.2 } else { 1e-4 };
        let widened = logits(&weights, None, tokens);
        let found = gap(&widened, theirs);
        assert!(found < most, "{name}: {found} off");
        if name != "gpt2" {
            let found = gap(&widened, expected.get("widened"));
            assert!(found < 1e-5, "{name}: {found} off the widened weights");
        }
        let found = gap(&logits(&weights, Some(&lora), tokens), &widened);
        assert!(found < 1e-5, "{name}: {found} off its own widened weights");
        let layer =
            if name == "gpt2" { "transformer.h.0.attn.c_attn" } else { "model.layers.0.self_attn.q_proj" };
        let layer = format!("{layer}.weight");
        let builder = weights.tensors(DType::F32, &Device::Cpu);
        let read = builder.get(&weights.shapes()[&layer][..], &layer).unwrap();
        assert_eq!(gap(&read, expected.get("weight")), 0.0, "{name}");
        // Parts, as ranks read them, begin anywhere.
        let (whole, len) = (read.flatten_all().unwrap().to_vec1::<f32>().unwrap(), read.elem_count());
        let ranges = [0..1, 63..66, len / 3..len / 2, len - 3..len];
        let part = weights.parts().read(&layer, read.shape(), Init::Const(0.0), DType::F32, &ranges).unwrap();
        let expected: Vec<f32> = ranges.into_iter().flatten().map(|place| whole[place]).collect();
        assert_eq!(part.to_vec1::<f32>().unwrap(), expected, "{name}");
    }
}

/// The codes of the folder are those that are held.
#[test]
fn codes_are_taken_as_they_are() {
    let path = folder("bits").join("nf4-double");
    let (weights, layer) = (Weights::folder(&path).unwrap(), "model.layers.1.mlp.up_proj");
    let file = fs::read(path.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let bytes = |part: &str| file.tensor(&format!("{layer}.weight{part}")).unwrap().data().to_vec();
    let blocks: Vec<u8> = weights
        .tensors(DType::U8, &Device::Cpu)
        .get((128, 33), &format!("{layer}.nf4.weight"))
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    let codes: Vec<u8> = blocks.chunks_exact(33).flat_map(|block| &block[1..]).copied().collect();
    let scales: Vec<u8> = blocks.chunks_exact(33).map(|block| block[0]).collect();
    assert!(codes == bytes("") && scales == bytes(".absmax"));
}

#[test]
fn adapters_on_such_a_base_train_as_pefts() -> Result<()> {
    let (path, adapters) = (folder("bits").join("nf4-double"), folder("bits").join("adapters"));
    let (weights, expected) = (Weights::folder(&path).unwrap(), Expected::of("bits/nf4-double"));
    let lora =
        Lora::from_folder(&adapters, weights.config()).unwrap().quantized_as(&weights.formats()).unwrap();
    let (weights, vars) = (weights.with_adapters(&adapters, &lora).unwrap(), VarMap::new());
    let builder = lora.adapt(Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu)));
    let model = CausalLm::new(weights.config(), &builder)?;
    let found = gap(&model.logits(expected.get("tokens"))?, expected.get("adapted"));
    assert!(found < 1e-4, "{found} off");
    let trained: Vec<_> = named_vars(&vars).into_iter().filter(|(name, _)| lora.trains(name)).collect();
    let tensors: Vec<_> = trained.iter().map(|(_, var)| var.clone()).collect();
    let (mut trainer, mut losses) = (Trainer::new(trained, |_| true), Vec::new());
    for [tokens, targets] in expected.batches(0, 1) {
        let loss = model.loss(&tokens, &targets)?;
        let mut grads = loss.backward()?;
        clip_grad_norm(&mut grads, &tensors, 1.0)?;
        trainer.step(&grads)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    assert_losses(&losses, &expected.losses(), "nf4-double");
    Ok(())
}

/// A folder of the widened and merged weights computes the same, and says nothing of bits.
#[test]
fn widened_weights_are_saved_and_merged() -> Result<()> {
    for name in ["nf4", "int8"] {
        let (weights, expected) =
            (Weights::folder(&folder("bits").join(name)).unwrap(), Expected::of(&format!("bits/{name}")));
        let (lora, out) = (on_its_base(&weights), tempfile::tempdir().unwrap());
        let how = FolderConfig { dtypes_of: Some(weights.clone()), ..FolderConfig::default() };
        let mut writer = FolderWriter::begin(out.path(), weights.config(), DType::F64, &how).unwrap();
        let merged = MergedWeights::new(&weights, Some(&lora));
        weights.shapes().keys().for_each(|name| writer.write(name, &merged.get(name).unwrap()).unwrap());
        writer.finish().unwrap();
        let read = Weights::folder(out.path()).unwrap();
        assert_eq!((read.bits(), read.config().bits()), (None, None));
        assert_eq!(read.dtype("model.layers.0.mlp.up_proj.weight"), Some(DType::F32));
        let tokens = expected.get("tokens");
        assert_eq!(gap(&logits(&read, None, tokens), &logits(&weights, None, tokens)), 0.0, "{name}");
    }
    Ok(())
}

/// A copy of a folder, whose tensors and configuration are changed.
fn changed(name: &str, change: impl Fn(&mut HashMap<String, Tensor>, &mut String)) -> String {
    let (from, out) = (folder("bits").join(name), tempfile::tempdir().unwrap());
    let mut config = fs::read_to_string(from.join("config.json")).unwrap();
    let mut tensors = read(&from);
    change(&mut tensors, &mut config);
    fs::write(out.path().join("config.json"), config).unwrap();
    candle_core::safetensors::save(&tensors, out.path().join("model.safetensors")).unwrap();
    match Weights::folder(out.path()) {
        Err(error) => error.to_string(),
        Ok(weights) => {
            let builder = weights.tensors(DType::F32, &Device::Cpu);
            let read =
                |(name, dims): (&String, &Vec<usize>)| Some(builder.get(&dims[..], name).err()?.to_string());
            // Where it is asked for, a backtrace follows.
            weights.shapes().iter().find_map(read).expect("an error").lines().next().unwrap().to_string()
        }
    }
}

fn read(folder: &Path) -> HashMap<String, Tensor> {
    load_tensors(&folder.join("model.safetensors"), &Device::Cpu).unwrap()
}

#[test]
fn what_cannot_be_read_is_named() {
    const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
    let part = |name: &str| format!("{WEIGHT}.{name}");
    let state = part("quant_state.bitsandbytes__nf4");
    let without = |name: String| changed("nf4-double", move |tensors, _| drop(tensors.remove(&name)));
    for name in
        [part("absmax"), part("quant_map"), part("nested_absmax"), part("nested_quant_map"), WEIGHT.into()]
    {
        let said = without(name.clone());
        assert!(said.contains(&name) && said.contains("not whole"), "{said}");
    }
    let half = |name: String| {
        changed("nf4-double", move |tensors, _| {
            let all = tensors[&name].flatten_all().unwrap();
            tensors.insert(name.clone(), all.narrow(0, 0, all.elem_count() / 2).unwrap());
        })
    };
    assert!(half(part("absmax")).contains("has 64 numbers, and"));
    assert!(half(WEIGHT.into()).contains("should have [128, 64] numbers of 4 bits"));
    assert!(half(state.clone()).contains("does not say how"));
    let renamed = changed("nf4-double", |tensors, _| {
        let own = tensors.remove(&state).unwrap();
        tensors.insert(part("quant_state.bitsandbytes__int3"), own);
    });
    assert!(renamed.contains("is of int3, which is not supported; supported are nf4 and fp4"), "{renamed}");
    let scales = changed("nf4", |tensors, _| {
        let nan = (tensors[&part("absmax")].ones_like().unwrap() * f64::NAN).unwrap();
        tensors.insert(part("absmax"), nan);
    });
    assert!(scales.contains(&part("absmax")) && scales.contains("NaN"), "{scales}");
    let other = changed("nf4", |_, config| {
        *config = config
            .replace("\"load_in_4bit\": true", "\"load_in_4bit\": false")
            .replace("\"load_in_8bit\": false", "\"load_in_8bit\": true")
    });
    assert!(other.contains("says that weights are in 8 bits") && other.contains("some in 4"), "{other}");
}
