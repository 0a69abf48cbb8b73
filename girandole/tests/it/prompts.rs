//! A prompt that is divided over the ranks of `cp` is continued as one process continues it.

use candle_core::{DType, Device, Result, Tensor};
use girandole::comm::Local;
use girandole::models::{Cache, CausalLm, Weights};
use girandole::ops::RowContext;
use girandole::training::build::Builder;
use girandole::{Layout, Parallel};

use crate::common::{Setup, config, gpt2, mistral};

const PROMPT: [u32; 11] = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9];
const AFTER: [u32; 3] = [32, 38, 46];

/// Logits after the prompt, and after each later token.
fn logits(model: &CausalLm, prompt: &RowContext) -> Result<Vec<Vec<f64>>> {
    let (mut cache, mut found) = (Cache::new(), Vec::new());
    let tokens = |tokens: &[u32]| Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0);
    let mut own = tokens(&PROMPT)?;
    if let Some(rows) = &prompt.divided {
        own = rows.part_of(&own)?;
    }
    found.push(prompt.scope(|| model.next_logits(&own, &mut cache))?.squeeze(0)?.to_vec1()?);
    assert_eq!(cache.len(), PROMPT.len());
    for token in AFTER {
        found.push(model.next_logits(&tokens(&[token])?, &mut cache)?.squeeze(0)?.to_vec1()?);
    }
    Ok(found)
}

#[test]
fn logits_after_a_divided_prompt_are_those_of_one_process() {
    let families = [
        (Setup::default(), config(Setup::default().tied)),
        (Setup { mistral: true, ..Setup::default() }, mistral()),
        (Setup { gpt2: true, ..Setup::default() }, gpt2()),
    ];
    for (setup, config) in families {
        let weights = Weights::random(&config, 7).unwrap();
        let builder = Builder::new(weights.tensors(DType::F64, &Device::Cpu));
        let model = CausalLm::new(&config, &builder).unwrap();
        let expected = logits(&model, &RowContext::default()).unwrap();
        for layout in ["cp=2", "cp=3", "cp=6", "shard=2,cp=2", "cp=3,tp=2"] {
            let layout: Layout = layout.parse().unwrap();
            let found = Local::run_shared(layout.ranks(), |comm| {
                let model: Parallel<CausalLm> = setup.parallel(comm, &layout, None)?;
                let context = model.prompt_context(PROMPT.len())?;
                assert!(context.divided.is_some() && model.prompt_context(1)?.divided.is_none());
                Ok(logits(model.model()?.unwrap(), &context)?)
            });
            let found = found.unwrap();
            for own in &found {
                let pairs = own.iter().flatten().zip(expected.iter().flatten());
                let gap = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(own.len() == expected.len() && gap < 1e-10, "{layout}: {gap}");
                // All ranks choose the same tokens.
                assert_eq!(own, &found[0], "{layout}");
            }
        }
    }
}
