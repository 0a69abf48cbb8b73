//! Text generation with and without a cache.

use std::ops::ControlFlow;

use crate::common::{Expected, FOLDERS, best, folder, gap};
use candle_core::{DType, Device, Tensor};
use comm::Local;
use fsdp::{Fsdp, FsdpConfig};
use models::{Cache, CausalLm, GenerateConfig, Weights, generate};
use training::build::Builder;

fn load(name: &str) -> CausalLm {
    let weights = Weights::folder(&folder(name)).unwrap();
    CausalLm::new(weights.config(), &Builder::new(weights.tensors(DType::F32, &Device::Cpu))).unwrap()
}

fn row(tokens: &[u32]) -> Tensor {
    Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu).unwrap()
}

fn go_on(_: u32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn a_cache_changes_nothing() {
    for name in FOLDERS {
        let model = load(name);
        let tokens: Vec<u32> = (0..30).map(|place| place * 37 % 96).collect();
        let all = model.logits(&row(&tokens)).unwrap();
        let mut cache = Cache::new();
        // Parts of various lengths, and also of several rows.
        for part in [0..7, 7..8, 8..9, 9..20, 20..30] {
            let logits = model.next_logits(&row(&tokens[part.clone()]), &mut cache).unwrap();
            let found = gap(&logits, &all.narrow(1, part.end - 1, 1).unwrap().squeeze(1).unwrap());
            assert!(found < 1e-5 && cache.len() == part.end, "{name}: {found} after {}", part.end);
        }
    }
}

#[test]
fn greedy_texts_are_transformers_also_of_a_sharded_model() {
    for name in FOLDERS {
        let expected = Expected::of(name);
        let numbers = |tensor: &str| {
            let tensor = expected.get(tensor).to_dtype(DType::U32).unwrap();
            tensor.flatten_all().unwrap().to_vec1::<u32>().unwrap()
        };
        let config = GenerateConfig { max_new_tokens: 24, ..GenerateConfig::default() };
        let (prompt, greedy) = (numbers("prompt"), numbers("greedy"));
        assert_eq!(generate(&load(name), &prompt, &config, go_on).unwrap(), greedy, "{name}");
        let weights = Weights::folder(&folder(name)).unwrap();
        let both = Local::run_shared(2, |comm| {
            let build = |units| CausalLm::new(weights.config(), &Builder::from(units));
            let vb = weights.tensors(DType::F32, &Device::Cpu);
            let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), build)?;
            Ok(generate(fsdp.model()?, &prompt, &config, go_on).unwrap())
        });
        assert_eq!(both.unwrap(), [greedy.clone(), greedy], "{name}");
    }
}

#[test]
fn seeds_decide() {
    let model = load("llama");
    let of = |seed| {
        let config =
            GenerateConfig { max_new_tokens: 20, temperature: 1.5, seed, ..GenerateConfig::default() };
        generate(&model, &[1, 2, 3], &config, go_on).unwrap()
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    let top_k =
        GenerateConfig { max_new_tokens: 20, temperature: 1.5, top_k: Some(1), ..GenerateConfig::default() };
    let greedy = GenerateConfig { temperature: 0.0, ..top_k.clone() };
    let [a, b] = [top_k, greedy].map(|config| generate(&model, &[1, 2, 3], &config, go_on).unwrap());
    assert_eq!(a, b);
}

#[test]
fn texts_end() {
    let model = load("gpt2");
    let config = GenerateConfig { max_new_tokens: 1000, ..GenerateConfig::default() };
    // 64 positions: a prompt of 60 tokens gives 5 new ones, because the last is not fed back.
    let prompt: Vec<u32> = (0..60).collect();
    let all = generate(&model, &prompt, &config, go_on).unwrap();
    assert_eq!(all.len(), 5);
    let stop = GenerateConfig { stop: vec![all[0]], ..config.clone() };
    assert_eq!(generate(&model, &prompt, &stop, go_on).unwrap(), all[..1]);
    let mut seen = Vec::new();
    let two = generate(&model, &prompt, &config, |token| {
        seen.push(token);
        if seen.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((&two.unwrap()[..], &seen[..]), (&all[..2], &all[..2]));
    let none = GenerateConfig { max_new_tokens: 0, ..config.clone() };
    assert!(generate(&model, &prompt, &none, go_on).unwrap().is_empty());
    let line = |prompt: &[u32]| generate(&model, prompt, &config, go_on).unwrap_err().to_string();
    assert!(line(&[]).contains("give one at least"));
    assert!(line(&[96]).contains("(token) 96:"));
    assert!(line(&[0; 65]).contains("64 positions"));
    assert!(model.logits(&row(&[0; 65])).unwrap_err().to_string().contains("64 positions"));
    assert!(
        load("llama")
            .logits(&row(&[0; 65]))
            .unwrap_err()
            .to_string()
            .contains("rows of 65 tokens are longer than the model's 64 positions")
    );
}

#[test]
fn rows_of_a_batch_are_continued_together() {
    let model = load("qwen3");
    let rows = Tensor::new(&[[5u32, 6, 7], [8, 9, 10]], &Device::Cpu).unwrap();
    let together = model.next_logits(&rows, &mut Cache::new()).unwrap();
    let alone = model.next_logits(&row(&[8, 9, 10]), &mut Cache::new()).unwrap();
    assert_eq!(best(&together)[1], best(&alone)[0]);
}
