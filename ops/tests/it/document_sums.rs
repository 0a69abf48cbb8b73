//! Sums over documents, and losses of pairs: the same for whole rows and for rows that ranks divide, gradients included.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor, Var};
use ops::{
    DividedRows, Documents, Pair, PendingExchange, PreferenceConfig, PreferenceLoss, Preferences, RowContext,
    RowExchange, backward, document_sums,
};

/// Ranks that are threads.
#[derive(Debug)]
struct Threads {
    rank: usize,
    to: Vec<Mutex<Sender<Vec<Tensor>>>>,
    from: Vec<Mutex<Receiver<Vec<Tensor>>>>,
}

struct Done;

impl PendingExchange for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl RowExchange for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn begin(
        &self,
        (to, outgoing): (usize, Vec<Tensor>),
        (from, incoming): (usize, Vec<Tensor>),
    ) -> Result<Box<dyn PendingExchange>> {
        self.to[to].lock().unwrap().send(outgoing).unwrap();
        let arrived = self.from[from].lock().unwrap().recv().unwrap();
        for (own, other) in incoming.iter().zip(arrived) {
            own.slice_set(&other, 0, 0)?;
        }
        Ok(Box::new(Done))
    }
}

fn threads(ranks: usize) -> Vec<Arc<Threads>> {
    let mut to: Vec<Vec<_>> = (0..ranks).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<_>> = (0..ranks).map(|_| Vec::new()).collect();
    for receiver in from.iter_mut() {
        for sender in to.iter_mut() {
            let (send, receive) = channel();
            sender.push(Mutex::new(send));
            receiver.push(Mutex::new(receive));
        }
    }
    let ranks = to.into_iter().zip(from).enumerate();
    ranks.map(|(rank, (to, from))| Arc::new(Threads { rank, to, from })).collect()
}

/// Runs `of` on each rank, with rows of which it has the given places.
fn on_ranks<T: Send>(places: &[Vec<u32>], of: impl Fn(DividedRows) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks = threads(places.len()).into_iter();
        let of = &of;
        let running: Vec<_> = ranks
            .map(|rank| scope.spawn(move || of(DividedRows::new(places.to_vec(), rank).unwrap())))
            .collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

const PLACES: [&[u32]; 3] = [&[0, 7, 8], &[1, 2, 5, 6], &[3, 4, 9]];

fn documents() -> Documents {
    Documents::new([vec![3, 4, 2], vec![6, 4]]).unwrap()
}

#[test]
fn sums_of_documents_are_those_of_all_ranks() -> Result<()> {
    let documents = documents();
    let lengths: Vec<Vec<u32>> = documents.lengths().map(Vec::from).collect();
    let x = Var::from_tensor(&Tensor::randn(0f64, 1., (2, 10, 3), &Device::Cpu)?)?;
    let count = lengths.iter().map(Vec::len).sum::<usize>();
    let outer = Tensor::randn(0f64, 1., (count, 3), &Device::Cpu)?;
    for only_last in [false, true] {
        // Each document alone.
        let mut alone = Vec::new();
        for (row, lengths) in lengths.iter().enumerate() {
            let mut first = 0;
            for len in lengths.iter().map(|len| *len as usize) {
                let skipped = if only_last { len - 1 } else { 0 };
                alone.push(x.narrow(0, row, 1)?.narrow(1, first + skipped, len - skipped)?.sum(1)?);
                first += len;
            }
        }
        let alone = Tensor::cat(&alone, 0)?;
        let expected = (&alone * &outer)?.sum_all()?.backward()?.get(&x).unwrap().clone();
        let context = RowContext { documents: Some(documents.clone()), ..RowContext::default() };
        let sums = |context: &RowContext, x: &Tensor| {
            let places = context.document_places("test", [2, x.dim(1)?])?;
            let groups: Vec<Option<usize>> = places
                .iter()
                .map(|place| place.filter(|place| !only_last || place.is_last()).map(|place| place.document))
                .collect();
            context.scope(|| document_sums(x, &groups, context.document_count(2)))
        };
        let whole = sums(&context, &x)?;
        let grads = backward(&(&whole * &outer)?.sum_all()?)?;
        assert!(gap(&whole, &alone) < 1e-12 && gap(grads.get(&x).unwrap(), &expected) < 1e-12);
        for found in on_ranks(&PLACES.map(Vec::from), |divided| {
            let context = RowContext { divided: Some(divided.clone()), ..context.clone() };
            let own = Var::from_tensor(&divided.part_of(&x)?)?;
            let sums = sums(&context, &own)?;
            // All ranks compute the same of the sums.
            let loss = ((&sums * &outer)?.sum_all()? / divided.ranks() as f64)?;
            let of_own = backward(&loss)?.get(&own).unwrap().clone();
            Ok::<_, candle_core::Error>((gap(&sums, &alone), gap(&of_own, &divided.part_of(&expected)?)))
        }) {
            let (of_sums, of_gradient) = found?;
            assert!(of_sums < 1e-12 && of_gradient < 1e-12, "{of_sums} {of_gradient}");
        }
    }
    Ok(())
}

#[test]
fn wrong_groups_are_refused() -> Result<()> {
    let x = Tensor::zeros((1, 3), candle_core::DType::F32, &Device::Cpu)?;
    for (groups, said) in [(&[Some(0); 2][..], "give those of 1 rows of 3"), (&[Some(2); 3], "group 2 of 2")]
    {
        let error = document_sums(&x, groups, 2).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    Ok(())
}

const LOSSES: [PreferenceLoss; 5] = [
    PreferenceLoss::Dpo,
    PreferenceLoss::Ipo,
    PreferenceLoss::Hinge,
    PreferenceLoss::Orpo,
    PreferenceLoss::SimPo,
];

/// Two rows of a pair each, of which all tokens of chosen documents have targets, and their documents and targets.
fn pairs(loss: PreferenceLoss) -> (Preferences, Documents, Tensor) {
    let config = PreferenceConfig { loss, label_smoothing: 0.1, ..PreferenceConfig::default() };
    let pairs = vec![
        vec![Pair { answers: [1, 1], reference: [-2.5, -3.0], ..Pair::default() }],
        vec![Pair { answers: [2, 2], reference: [-1.0, -9.0], ..Pair::default() }],
    ];
    // Cross-entropies have a weight of their own.
    let preferences = Preferences::new(config, pairs).unwrap().renewed(Some(0.4));
    let mut targets = vec![1i64; 20];
    for (row, place) in [(0, 2), (0, 3), (0, 6), (0, 7), (0, 8), (0, 9), (1, 3), (1, 4), (1, 5), (1, 9)] {
        targets[row * 10 + place] = -100;
    }
    let targets = Tensor::from_vec(targets, (2, 10), &Device::Cpu).unwrap();
    (preferences, Documents::new([vec![3, 4], vec![4, 6]]).unwrap(), targets)
}

fn loss_of(
    (preferences, documents, divided): (&Preferences, &Documents, Option<DividedRows>),
    log_probs: &Tensor,
    targets: &Tensor,
) -> Result<Tensor> {
    let context = RowContext {
        documents: Some(documents.clone()),
        preferences: Some(preferences.clone()),
        divided,
        ..RowContext::default()
    };
    context.scope(|| preferences.loss(log_probs, targets, -100))
}

fn log_probs() -> Result<Var> {
    Var::from_tensor(&Tensor::randn(-2f64, 0.5, (2, 10), &Device::Cpu)?)
}

#[test]
fn gradients_of_losses_of_pairs_are_their_slopes() -> Result<()> {
    let x = log_probs()?;
    for loss in LOSSES {
        let (preferences, documents, targets) = pairs(loss);
        let of = |x: &Tensor| loss_of((&preferences, &documents, None), x, &targets);
        let found = backward(&of(&x)?)?.get(&x).unwrap().flatten_all()?.to_vec1::<f64>()?;
        for place in [1, 5, 12, 17] {
            let at = |by: f64| {
                let mut numbers = x.flatten_all()?.to_vec1::<f64>()?;
                numbers[place] += by;
                of(&Tensor::from_vec(numbers, (2, 10), &Device::Cpu)?)?.to_scalar::<f64>()
            };
            let slope = (at(1e-5)? - at(-1e-5)?) / 2e-5;
            assert!((slope - found[place]).abs() < 1e-8, "{loss:?} {place}: {slope} {}", found[place]);
        }
    }
    Ok(())
}

#[test]
fn losses_of_pairs_are_those_of_all_ranks() -> Result<()> {
    let x = log_probs()?;
    for loss in LOSSES {
        let (preferences, documents, targets) = pairs(loss);
        let whole = loss_of((&preferences, &documents, None), &x, &targets)?;
        let expected = backward(&whole)?.get(&x).unwrap().clone();
        let of_all = preferences.results();
        for found in on_ranks(&PLACES.map(Vec::from), |divided| {
            let (own, targets) = (Var::from_tensor(&divided.part_of(&x)?)?, divided.part_of(&targets)?);
            let preferences = preferences.renewed(None);
            let loss = loss_of((&preferences, &documents, Some(divided.clone())), &own, &targets)?;
            let of_own = backward(&(&loss / divided.ranks() as f64)?)?.get(&own).unwrap().clone();
            let gaps = [gap(&loss, &whole), gap(&of_own, &divided.part_of(&expected)?)];
            Ok::<_, candle_core::Error>((gaps, preferences.results()))
        }) {
            let (gaps, results) = found?;
            assert!(gaps.iter().all(|gap| *gap < 1e-12), "{loss:?}: {gaps:?}");
            assert_eq!(results.len(), 2);
            for (found, expected) in results.iter().zip(&of_all) {
                assert!((found.loss - expected.loss).abs() < 1e-12);
            }
        }
    }
    Ok(())
}

/// ORPO counts all tokens of chosen documents.
#[test]
fn orpo_without_the_targets_of_prompts_is_refused() -> Result<()> {
    let (preferences, documents, targets) = pairs(PreferenceLoss::Orpo);
    targets.narrow(0, 0, 1)?.slice_set(&Tensor::full(-100i64, (1, 1), &Device::Cpu)?, 1, 0)?;
    let x = log_probs()?;
    let error = loss_of((&preferences, &documents, None), &x, &targets).unwrap_err().to_string();
    assert!(error.contains("4 targets of chosen documents: ORPO needs all 5"), "{error}");
    Ok(())
}
