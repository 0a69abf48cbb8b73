//! The data loader: order, errors, panics, early drop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use sampler::{
    BoxError, DataLoader, DataLoaderConfig, Dataset, DistributedSampler, DistributedSamplerConfig, Generator,
    Indices, RandomSampler, Sampler, SamplerError, SequentialSampler,
};

/// Samples that equal their index; some of them fail. Counts how many were loaded.
#[derive(Default)]
struct Numbers {
    len: usize,
    error_at: Option<usize>,
    panic_at: Option<usize>,
    delay: Duration,
    /// Delays every third sample, so that batches finish out of order.
    uneven: bool,
    loaded: AtomicUsize,
}

impl Dataset for Numbers {
    type Item = usize;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<usize, BoxError> {
        self.loaded.fetch_add(1, Ordering::SeqCst);
        if self.uneven && index.is_multiple_of(3) {
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(self.delay);
        if self.panic_at == Some(index) {
            panic!("no sample {index}");
        }
        if self.error_at == Some(index) {
            return Err(format!("sample {index} is unreadable").into());
        }
        Ok(index)
    }
}

type Loader = DataLoader<Numbers, Vec<usize>>;

fn loader(numbers: Numbers, config: DataLoaderConfig) -> Loader {
    let sampler: Box<dyn Sampler> = Box::new(SequentialSampler::new(numbers.len));
    DataLoader::new(Arc::new(numbers), sampler, Ok, config).unwrap()
}

fn config(batch_size: usize, num_workers: usize) -> DataLoaderConfig {
    DataLoaderConfig { batch_size, num_workers, ..Default::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn sampler_order_whatever_the_workers_do(
        len in 0..60usize, batch_size in 1..8usize, num_workers in 0..5usize, prefetch_factor in 1..4usize,
        drop_last: bool, seed: u64,
    ) {
        let sampler = || RandomSampler::new(len, Generator::new(seed));
        let mut wanted: Vec<Vec<usize>> =
            sampler().indices().unwrap().collect::<Vec<_>>().chunks(batch_size).map(<[_]>::to_vec).collect();
        if drop_last && len % batch_size != 0 {
            wanted.pop();
        }
        let dataset = Arc::new(Numbers { len, uneven: true, ..Default::default() });
        let config = DataLoaderConfig { batch_size, drop_last, num_workers, prefetch_factor };
        let mut loader = DataLoader::new(dataset, sampler(), Ok, config).unwrap();
        prop_assert_eq!(loader.len(), wanted.len());
        let mut batches = loader.batches().unwrap();
        let got: Vec<_> = batches.by_ref().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(batches.samples(), wanted.iter().map(Vec::len).sum::<usize>());
        prop_assert!(batches.next().is_none());
        prop_assert_eq!(got, wanted);
    }
}

#[test]
fn an_error_comes_out_at_its_batch_and_the_rest_follows() {
    for num_workers in [0, 1, 3] {
        let numbers = Numbers { len: 10, error_at: Some(4), ..Default::default() };
        let mut loader = loader(numbers, config(3, num_workers));
        let batches: Vec<_> = loader.batches().unwrap().collect();
        assert_eq!(batches.len(), 4);
        for (number, batch) in batches.into_iter().enumerate() {
            match batch {
                Ok(samples) => assert_eq!(samples[0], 3 * number),
                Err(error) => {
                    assert!(matches!(error, SamplerError::LoadSample { batch: 1, index: 4, .. }));
                    assert_eq!(error.to_string(), "batch 1: loading sample 4 failed: sample 4 is unreadable");
                    assert_eq!(number, 1);
                }
            }
        }
    }
}

#[test]
fn a_panic_comes_out_as_an_error() {
    for num_workers in [0, 2] {
        let numbers = Numbers { len: 10, panic_at: Some(7), ..Default::default() };
        let mut loader = loader(numbers, config(2, num_workers));
        let mut batches = loader.batches().unwrap();
        let results: Vec<_> = batches.by_ref().collect();
        assert_eq!(batches.samples(), 10);
        assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, true, false, true]);
        let message = results[3].as_ref().unwrap_err().to_string();
        assert_eq!(message, "batch 3: loading sample 7 panicked: no sample 7; this is a bug in the data set");
    }
}

#[test]
fn collate_may_fail_or_panic() {
    for num_workers in [0, 2] {
        let collate = |items: Vec<usize>| match items[0] {
            2 => Err("ragged".into()),
            4 => panic!("no shape"),
            _ => Ok(items),
        };
        let dataset = Arc::new((0..8usize).collect::<Vec<_>>());
        let sampler = SequentialSampler::new(8);
        let mut loader = DataLoader::new(dataset, sampler, collate, config(2, num_workers)).unwrap();
        let results: Vec<_> = loader.batches().unwrap().collect();
        assert!(results[0].is_ok() && results[3].is_ok());
        assert!(matches!(results[1], Err(SamplerError::Collate { batch: 1, .. })));
        assert!(matches!(results[2], Err(SamplerError::CollatePanicked { batch: 2, .. })));
    }
}

struct Broken;

impl Sampler for Broken {
    fn len(&self) -> usize {
        100
    }

    fn indices(&mut self) -> Result<Indices, SamplerError> {
        Ok(Box::new((0..100).inspect(|&index| assert!(index < 5, "lost count"))))
    }
}

#[test]
fn a_panicking_sampler_ends_the_epoch() {
    for num_workers in [0, 2] {
        let numbers = Numbers { len: 100, ..Default::default() };
        let mut loader = DataLoader::new(Arc::new(numbers), Broken, Ok, config(2, num_workers)).unwrap();
        let results: Vec<_> = loader.batches().unwrap().collect();
        assert_eq!(results.len(), 3);
        assert!(matches!(results[2], Err(SamplerError::SamplerPanicked { batch: 2, .. })));
    }
}

#[test]
fn prefetch_is_bounded() {
    let numbers = Numbers { len: 1000, ..Default::default() };
    let config = DataLoaderConfig { batch_size: 2, num_workers: 2, prefetch_factor: 3, ..Default::default() };
    let mut loader = loader(numbers, config);
    let mut batches = loader.batches().unwrap();
    batches.next().unwrap().unwrap();
    // One batch was taken, and six more may be loaded.
    let bound = 2 * (1 + 2 * 3);
    let loaded = || loader.dataset().loaded.load(Ordering::SeqCst);
    let start = Instant::now();
    while loaded() < bound && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Long enough for a worker that ignores the bound.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(loaded(), bound);
}

#[test]
fn dropping_early_ends_the_workers() {
    let numbers = Numbers { len: 1_000_000, delay: Duration::from_millis(5), ..Default::default() };
    let mut loader = loader(numbers, config(1000, 3));
    let batches = loader.batches().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    drop(batches);
    assert!(start.elapsed() < Duration::from_secs(2), "a batch takes 5 s, a sample 5 ms");
    assert_eq!(Arc::strong_count(loader.dataset()), 1, "no thread holds the data set any more");
}

#[test]
fn impossible_settings_are_errors() {
    let new = |bound: usize, config: DataLoaderConfig| {
        let numbers = Numbers { len: 10, ..Default::default() };
        DataLoader::new(Arc::new(numbers), SequentialSampler::new(bound), Ok, config).map(|_| ())
    };
    assert!(matches!(new(10, config(0, 0)), Err(SamplerError::ZeroBatchSize)));
    let no_prefetch = DataLoaderConfig { prefetch_factor: 0, ..config(1, 1) };
    assert!(matches!(new(10, no_prefetch), Err(SamplerError::ZeroPrefetch { num_workers: 1 })));
    assert!(matches!(new(11, config(1, 0)), Err(SamplerError::SamplerExceedsDataset { .. })));
    assert!(new(9, config(usize::MAX, 0)).is_ok());
}

#[test]
fn batches_of_any_size() {
    for num_workers in [0, 1] {
        let mut loader = loader(Numbers { len: 5, ..Default::default() }, config(usize::MAX, num_workers));
        let batches: Vec<_> = loader.batches().unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(batches, [vec![0, 1, 2, 3, 4]]);
    }
}

#[test]
fn resuming_after_some_batches_goes_on_where_it_was() {
    let sampler = || {
        let config =
            DistributedSamplerConfig { dataset_len: 50, num_replicas: 2, rank: 1, ..Default::default() };
        DistributedSampler::new(config).unwrap()
    };
    let dataset = Arc::new((0..50usize).collect::<Vec<_>>());
    let mut first = DataLoader::new(Arc::clone(&dataset), sampler(), Ok, config(4, 2)).unwrap();
    first.set_epoch(3);
    let mut batches = first.batches().unwrap();
    for batch in batches.by_ref().take(2) {
        batch.unwrap();
    }
    let state = first.sampler().state(batches.samples());
    assert_eq!((state.epoch, state.consumed), (3, 16));

    let mut second = DataLoader::new(dataset, sampler(), Ok, config(4, 0)).unwrap();
    second.sampler_mut().resume(&state).unwrap();
    let rest: Vec<Vec<usize>> = second.batches().unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(rest, batches.collect::<Result<Vec<_>, _>>().unwrap());
}
