//! Enumeration of strategies for a number of ranks; impossible ones have a reason.

use serde::Serialize;

use crate::compare::RuledOut;
use crate::model::Model;

use super::{Setting, Sharding, Strategy};

/// What is missing for a possible strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Shortage {
    /// A step has fewer samples than replicas of the model, each of which needs its own.
    Samples,
    /// A rank has less memory than needed.
    Memory,
}

impl Strategy {
    /// Returns the possible strategies, the simplest first.
    pub(crate) fn all(model: &Model, setting: &Setting) -> Vec<Self> {
        Self::ways(model, setting).0
    }

    /// Returns the strategies that are not possible.
    pub(crate) fn left_out(model: &Model, setting: &Setting) -> Vec<RuledOut> {
        let mut all = Vec::new();
        for (strategy, reason) in Self::ways(model, setting).1 {
            RuledOut::add(&mut all, strategy.name(setting.ranks), reason);
        }
        all
    }

    /// Returns the possible strategies, and the others with the reason.
    fn ways(model: &Model, setting: &Setting) -> (Vec<Self>, Vec<(Self, String)>) {
        let ranks = setting.ranks;
        if ranks == 1 {
            return (vec![Self::Tensor { tp: 1, sequence_parallel: false }], Vec::new());
        }
        let mut all =
            vec![Self::Data, Self::ShardedData(Sharding::Full), Self::ShardedData(Sharding::GradOp)];
        all.push(Self::ShardedData(Sharding::None));
        let groups = (2..ranks).filter(|shards| ranks.is_multiple_of(*shards));
        all.extend(groups.map(|shards| Self::ShardedData(Sharding::Hybrid { shards })));
        let mut others = Vec::new();
        for tp in (2..=ranks).filter(|tp| ranks.is_multiple_of(*tp)) {
            for sequence_parallel in [false, true] {
                let strategy = Self::Tensor { tp, sequence_parallel };
                match undivided(model, setting, (tp, sequence_parallel)) {
                    None => all.push(strategy),
                    // If the layers cannot be divided, sequence parallelism is not possible for the same reason.
                    Some(reason) => {
                        others.push((strategy, reason));
                        if !sequence_parallel {
                            break;
                        }
                    }
                }
            }
        }
        match model.units.len() {
            parts if parts >= ranks => all.push(Self::Pipeline),
            1 => others.push((Self::Pipeline, "the model is one part, which cannot be cut".into())),
            parts => others.push((Self::Pipeline, format!("the model has {parts} parts to be cut between"))),
        }
        (all, others)
    }

    /// Returns the number of replicas, each of which needs its own samples.
    pub(crate) fn copies(self, ranks: usize) -> usize {
        match self {
            Self::Data | Self::ShardedData(_) => ranks,
            Self::Tensor { tp, .. } => ranks / tp.max(1),
            Self::Pipeline => 1,
        }
    }
}

/// Returns what `tp` ranks do not divide, if there is anything.
fn undivided(model: &Model, setting: &Setting, (tp, sequence_parallel): (usize, bool)) -> Option<String> {
    let is_divided = |size: u64| size > 0 && size.is_multiple_of(tp as u64);
    if !sequence_parallel {
        if model.divisors.is_empty() {
            return Some("it takes two linear layers that belong together".into());
        }
        if let Some(sizes) = model.sizes.filter(|sizes| sizes.vocab_size < tp as u64) {
            return Some(format!("the vocabulary, {}, is less than one token for each", sizes.vocab_size));
        }
        let (what, size) = model.divisors.iter().find(|(_, size)| !is_divided(*size))?;
        return Some(format!("{what}, {size}, cannot be divided by so many"));
    }
    let (what, size) = match model.length {
        0 => ("the samples of a copy", (setting.batch_size / setting.ranks.div_ceil(tp)) as u64),
        length => ("the tokens of a row", length),
    };
    (!is_divided(size)).then(|| format!("{what}, {size}, cannot be divided by so many"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MlpLoss;

    fn setting(ranks: usize) -> Setting {
        Setting { ranks, batch_size: 16, micro_batches: 4, element: 4, gathered: 4, optimizer: 0 }
    }

    #[test]
    fn every_way_is_there_or_left_out_for_a_reason() {
        let model = Model::mlp("test", &[16, 24, 16], true, MlpLoss::Squares);
        for ranks in 2..=32 {
            let (all, others) = Strategy::ways(&model, &setting(ranks));
            let tensor = |tp| {
                let of =
                    |strategy: &Strategy| matches!(strategy, Strategy::Tensor { tp: own, .. } if *own == tp);
                all.iter().filter(|one| of(one)).count() + others.iter().filter(|(one, _)| of(one)).count()
            };
            for tp in (2..=ranks).filter(|tp| ranks.is_multiple_of(*tp)) {
                let expected = if 24 % tp == 0 { 2 } else { 1 };
                assert_eq!(tensor(tp), expected, "{ranks} ranks, tp {tp}");
            }
            assert!(
                others.contains(&(Strategy::Pipeline, "the model is one part, which cannot be cut".into()))
            );
        }
        let reasons = Strategy::left_out(&model, &setting(16));
        assert_eq!(reasons[0].names, ["tp 16"]);
        assert_eq!(reasons[0].reason, "the hidden size, 24, cannot be divided by so many");
        let alone = Model::mlp("test", &[20, 1], false, MlpLoss::Squares);
        let reasons = Strategy::left_out(&alone, &setting(4));
        assert_eq!(reasons[0].names, ["tp 2, dp 2", "tp 4"]);
    }

    #[test]
    fn copies_take_samples() {
        let copies = |strategy: Strategy| strategy.copies(8);
        assert_eq!(
            [Strategy::Data, Strategy::ShardedData(Sharding::Hybrid { shards: 2 })].map(copies),
            [8; 2]
        );
        assert_eq!(copies(Strategy::Tensor { tp: 4, sequence_parallel: true }), 2);
        assert_eq!(copies(Strategy::Pipeline), 1);
    }
}
