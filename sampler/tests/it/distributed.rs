//! The distributed sampler: extreme sizes, bad input, states of other runs.

use sampler::{DistributedSampler, DistributedSamplerConfig, Sampler, SamplerError, SamplerState, Tail};

fn config(dataset_len: usize, num_replicas: usize, rank: usize) -> DistributedSamplerConfig {
    DistributedSamplerConfig { dataset_len, num_replicas, rank, shuffle: false, ..Default::default() }
}

#[test]
fn a_billion_indices_take_no_memory() {
    let sampler = DistributedSampler::new(config(1_000_000_000, 3, 2)).unwrap();
    let mut indices = sampler.iter().unwrap();
    assert_eq!(indices.len(), 333_333_334);
    assert_eq!(indices.next(), Some(2));
    assert_eq!(indices.nth(333_333_330), Some(999_999_995));
    assert_eq!((indices.next(), indices.next(), indices.next()), (Some(999_999_998), Some(1), None));
}

#[test]
fn sizes_near_the_largest() {
    for tail in [Tail::Pad, Tail::Drop, Tail::Uneven] {
        for (dataset_len, ranks) in [(usize::MAX, 1), (usize::MAX, usize::MAX), (1, usize::MAX)] {
            let config = DistributedSamplerConfig { tail, ..config(dataset_len, ranks, ranks - 1) };
            let sampler = DistributedSampler::new(config).unwrap();
            let taken = sampler.iter().unwrap().take(3).count();
            assert_eq!(taken, sampler.len().min(3));
            let last = sampler.len().saturating_sub(1);
            assert_eq!(sampler.iter().unwrap().nth(last).is_some(), !sampler.is_empty());
        }
    }
    let odd = DistributedSampler::new(config(usize::MAX, 2, 0));
    assert!(matches!(odd, Err(SamplerError::EpochTooLong { .. })));
    let uneven = DistributedSamplerConfig { tail: Tail::Uneven, ..config(usize::MAX, 2, 0) };
    assert_eq!(DistributedSampler::new(uneven).unwrap().len(), usize::MAX / 2 + 1);
}

#[test]
fn shuffling_more_than_memory_is_an_error() {
    let config = DistributedSamplerConfig { shuffle: true, ..config(usize::MAX, 1, 0) };
    let mut sampler = DistributedSampler::new(config).unwrap();
    assert!(matches!(sampler.indices(), Err(SamplerError::OutOfMemory { .. })));
}

#[test]
fn no_samples_no_indices() {
    let config = DistributedSamplerConfig { shuffle: true, ..config(0, 3, 1) };
    let sampler = DistributedSampler::new(config).unwrap();
    assert!(sampler.is_empty());
    assert_eq!(sampler.iter().unwrap().next(), None);
}

#[test]
fn bad_ranks_are_named() {
    assert!(matches!(DistributedSampler::new(config(5, 0, 0)), Err(SamplerError::NoReplicas)));
    let error = DistributedSampler::new(config(5, 2, 2)).unwrap_err().to_string();
    assert_eq!(error, "rank 2 is out of range: 2 ranks are numbered 0 to 1; give each process its own rank");
}

#[test]
fn a_state_of_another_run_is_refused() {
    let mut sampler = DistributedSampler::new(config(10, 2, 0)).unwrap();
    let mine = sampler.state(2);
    let others = [
        (SamplerState { dataset_len: 11, ..mine.clone() }, "data set length is 11, this sampler's is 10"),
        (SamplerState { seed: 5, ..mine.clone() }, "seed is 5, this sampler's is 0"),
        (SamplerState { shuffle: true, ..mine.clone() }, "shuffle is true, this sampler's is false"),
    ];
    for (state, words) in others {
        let before = sampler.clone();
        let error = sampler.resume(&state).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(sampler, before);
    }
    sampler.resume(&SamplerState { consumed: usize::MAX, ..mine }).unwrap();
    assert!(sampler.is_empty());
}

#[test]
fn a_finished_epoch_stays_finished() {
    let mut sampler =
        DistributedSampler::new(DistributedSamplerConfig { tail: Tail::Drop, ..config(10, 4, 0) }).unwrap();
    let state = sampler.state(sampler.len());
    sampler.resume(&state).unwrap();
    assert!(sampler.is_empty(), "samples that were dropped must not come back at the epoch's end");
    sampler.set_epoch(1);
    assert_eq!(sampler.len(), 2);
}
