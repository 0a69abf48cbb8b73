//! What does not fit divided rows is refused, by name.

use candle_core::{DType, Device, ModuleT, Tensor};
use comm::Local;
use context_parallel::ContextParallel;
use ops::{
    AttentionConfig, AttentionMask, Dropout, Rotary, RotaryConfig, RowContext, RowKeys, attention,
    attention_with_key_mask,
};

#[test]
fn what_does_not_fit_is_refused() {
    let said = Local::run_shared(2, |comm| {
        let rows = ContextParallel::new(comm).divide(8, None)?;
        let context =
            RowContext { divided: Some(rows), keys: Some(RowKeys::new(1, 1, 0..1)), ..Default::default() };
        let x = |len: usize| Tensor::ones((1, len, 4), DType::F32, &Device::Cpu);
        let (own, all, config) = (x(4)?, x(8)?, AttentionConfig::new(2, AttentionMask::Causal));
        let after = AttentionConfig::new(2, AttentionMask::AntiCausal);
        let mask = Tensor::ones((1, 8), DType::U8, &Device::Cpu)?;
        let rotary = Rotary::new(&RotaryConfig::new(2, 7), &Device::Cpu).unwrap();
        context.scope(|| {
            let found = [
                attention(&all, &all, &all, &config),
                attention(&own, &own, &own, &after),
                attention_with_key_mask(&own, &own, &own, &mask, &config),
                rotary.apply(&own, 0),
                rotary.apply(&own, 1),
                Dropout::by_row(0.5, "layer").unwrap().forward_t(&all, true),
            ];
            Ok(found.map(|found| found.unwrap_err().to_string()).to_vec())
        })
    });
    for said in said.unwrap() {
        let expected = [
            "8 queries and 8 keys: give those of this rank's 4 places",
            "AttentionMask::AntiCausal; use another mask",
            "key_mask",
            "8 positions from 0 on are beyond the table of 7",
            "places up to 5: this rank has 4 of a row",
            "this rank has 4 of a row",
        ];
        for (said, expected) in said.iter().zip(expected) {
            assert!(said.contains(expected), "{said}");
        }
    }
}
