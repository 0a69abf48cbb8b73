//! Invariants for every data set, number of ranks and tail, with proptest against a simple reference.

use std::collections::HashMap;

use proptest::prelude::*;
use sampler::{
    BatchSampler, DistributedSampler, DistributedSamplerConfig, Generator, LazyPermutation, Sampler,
    SamplerState, SequentialSampler, Tail,
};

/// Each rank's part of an epoch, computed with lists instead of index arithmetic.
fn reference(order: &[usize], whole: &[usize], ranks: usize, tail: Tail) -> Vec<Vec<usize>> {
    let mut order = order.to_vec();
    match tail {
        Tail::Drop => order.truncate(order.len() / ranks * ranks),
        Tail::Uneven => {}
        Tail::Pad => {
            // Padding starts at the beginning of the order, and repeats it if necessary.
            let mut padding = whole.iter().copied().cycle();
            while !order.len().is_multiple_of(ranks) {
                order.extend(padding.next());
            }
        }
    }
    (0..ranks).map(|rank| order.iter().skip(rank).step_by(ranks).copied().collect()).collect()
}

fn epoch_order(config: &DistributedSamplerConfig, epoch: u64) -> Vec<usize> {
    match config.shuffle {
        true => Generator::new(config.seed.wrapping_add(epoch)).randperm(config.dataset_len).unwrap(),
        false => (0..config.dataset_len).collect(),
    }
}

fn samplers(config: &DistributedSamplerConfig, ranks: usize) -> Vec<DistributedSampler> {
    let of = |rank| DistributedSamplerConfig { num_replicas: ranks, rank, ..config.clone() };
    (0..ranks).map(|rank| DistributedSampler::new(of(rank)).unwrap()).collect()
}

fn parts(samplers: &mut [DistributedSampler]) -> Vec<Vec<usize>> {
    samplers
        .iter_mut()
        .map(|sampler| {
            let indices: Vec<_> = sampler.indices().unwrap().collect();
            assert_eq!(indices.len(), sampler.len());
            indices
        })
        .collect()
}

fn counts<'a>(indices: impl IntoIterator<Item = &'a usize>) -> HashMap<usize, usize> {
    let mut counts = HashMap::new();
    for &index in indices {
        *counts.entry(index).or_insert(0) += 1;
    }
    counts
}

/// Checks that the parts contain each sample of `order` as often as the tail allows, and have equal lengths except
/// under `Uneven`.
fn check_cover(order: &[usize], parts: &[Vec<usize>], tail: Tail) -> Result<(), TestCaseError> {
    let ranks = parts.len();
    let counts = counts(parts.iter().flatten());
    let total: usize = parts.iter().map(Vec::len).sum();
    match tail {
        Tail::Drop => {
            prop_assert_eq!(total, order.len() / ranks * ranks);
            prop_assert!(counts.iter().all(|(index, &count)| count == 1 && order.contains(index)));
        }
        Tail::Uneven => {
            prop_assert_eq!(total, order.len());
            prop_assert!(order.iter().all(|index| counts.get(index) == Some(&1)));
            prop_assert!(parts.windows(2).all(|pair| pair[0].len() - pair[1].len() <= 1));
        }
        Tail::Pad => {
            prop_assert_eq!(total, order.len().div_ceil(ranks) * ranks);
            prop_assert!(order.iter().all(|index| counts.contains_key(index)));
            let padding = total - order.len();
            prop_assert!(counts.values().map(|count| count - 1).sum::<usize>() <= padding);
        }
    }
    prop_assert!(tail == Tail::Uneven || parts.iter().all(|part| part.len() == parts[0].len()));
    Ok(())
}

fn configs() -> impl Strategy<Value = DistributedSamplerConfig> {
    let tail = prop_oneof![Just(Tail::Pad), Just(Tail::Drop), Just(Tail::Uneven)];
    (0..200usize, any::<bool>(), any::<u64>(), tail).prop_map(|(dataset_len, shuffle, seed, tail)| {
        DistributedSamplerConfig { dataset_len, shuffle, seed, tail, ..Default::default() }
    })
}

proptest! {
    #[test]
    fn ranks_share_an_epoch(config in configs(), ranks in 1..20usize, epoch in any::<u64>()) {
        let mut samplers = samplers(&config, ranks);
        samplers.iter_mut().for_each(|sampler| sampler.set_epoch(epoch));
        let parts = parts(&mut samplers);
        let order = epoch_order(&config, epoch);
        check_cover(&order, &parts, config.tail)?;
        prop_assert_eq!(parts, reference(&order, &order, ranks, config.tail));
    }

    #[test]
    fn resuming_at_the_same_number_of_ranks_goes_on(
        config in configs(), ranks in 1..8usize, epoch in 0..5u64, part in 0.0..1.2f64,
    ) {
        let mut whole = samplers(&config, ranks);
        whole.iter_mut().for_each(|sampler| sampler.set_epoch(epoch));
        let taken = (whole[0].len() as f64 * part) as usize;
        let state = whole[0].state(taken);
        let mut resumed = samplers(&config, ranks);
        for sampler in &mut resumed {
            sampler.resume(&state).unwrap();
            sampler.set_epoch(epoch); // as a training loop does
        }
        let rest: Vec<Vec<usize>> =
            parts(&mut whole).iter().map(|part| part.iter().skip(taken).copied().collect()).collect();
        prop_assert_eq!(parts(&mut resumed), rest);
        // The next epoch starts from its beginning.
        for sampler in whole.iter_mut().chain(&mut resumed) {
            sampler.set_epoch(epoch + 1);
        }
        prop_assert_eq!(parts(&mut resumed), parts(&mut whole));
    }

    #[test]
    fn resuming_at_another_number_of_ranks_deals_out_the_rest(
        config in configs(), steps in prop::collection::vec((1..8usize, 0..20usize), 1..4), epoch in 0..5u64,
    ) {
        let order = epoch_order(&config, epoch);
        let (dataset_len, seed, shuffle) = (config.dataset_len, config.seed, config.shuffle);
        let mut state = SamplerState { dataset_len, seed, shuffle, epoch, consumed: 0 };
        let mut done = 0; // samples of the order that were trained on
        for (ranks, taken) in steps {
            let mut samplers = samplers(&config, ranks);
            for sampler in &mut samplers {
                sampler.resume(&state).unwrap();
            }
            let parts = parts(&mut samplers);
            check_cover(&order[done..], &parts, config.tail)?;
            prop_assert_eq!(&parts, &reference(&order[done..], &order, ranks, config.tail));
            state = samplers[0].state(taken);
            done = if taken >= parts[0].len() { dataset_len } else { done + taken * ranks };
            prop_assert_eq!(state.consumed, done);
        }
    }

    #[test]
    fn skipping_is_taking_and_throwing_away(config in configs(), ranks in 1..8usize, skip in 0..30usize) {
        for sampler in samplers(&config, ranks) {
            let taken: Vec<_> = sampler.iter().unwrap().skip(skip).collect();
            let mut plain = sampler.iter().unwrap();
            for _ in 0..skip {
                plain.next();
            }
            prop_assert_eq!(plain.len(), taken.len());
            prop_assert_eq!(plain.collect::<Vec<_>>(), taken);
        }
    }

    #[test]
    fn lazy_permutations_are_randperm(
        len in 0..3000usize, seed: u64, steps in prop::collection::vec((0..300usize, 0..300usize), 0..8),
    ) {
        let expected = Generator::new(seed).randperm(len).unwrap();
        let mut lazy = LazyPermutation::new(seed, len);
        for (taken, skipped) in steps {
            let at = lazy.position();
            let drawn: Vec<usize> = lazy.by_ref().take(taken).map(Result::unwrap).collect();
            prop_assert_eq!(&drawn[..], &expected[at..len.min(at + taken)]);
            lazy.advance(skipped).unwrap();
            prop_assert_eq!(lazy.position(), len.min(at + taken + skipped));
        }
        let at = lazy.position();
        prop_assert_eq!(lazy.map(Result::unwrap).collect::<Vec<_>>(), &expected[at..]);
    }

    #[test]
    fn batches_partition_the_indices(len in 0..200usize, batch_size in 1..50usize, drop_last in any::<bool>()) {
        let mut sampler = BatchSampler::new(SequentialSampler::new(len), batch_size, drop_last).unwrap();
        let batches: Vec<_> = sampler.batches().unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(batches.len(), sampler.len());
        let (last, full) = batches.split_last().map_or((None, &[][..]), |(last, full)| (Some(last), full));
        prop_assert!(full.iter().all(|batch| batch.len() == batch_size));
        prop_assert!(last.is_none_or(|last| last.len() == batch_size || !drop_last && last.len() == len % batch_size));
        let kept = if drop_last { len / batch_size * batch_size } else { len };
        prop_assert_eq!(batches.concat(), (0..kept).collect::<Vec<_>>());
    }

    #[test]
    fn a_state_survives_json(dataset_len: usize, seed: u64, shuffle: bool, epoch: u64, consumed: usize) {
        let state = SamplerState { dataset_len, seed, shuffle, epoch, consumed };
        let text = serde_json::to_string(&state).unwrap();
        prop_assert_eq!(serde_json::from_str::<SamplerState>(&text).unwrap(), state);
    }
}
