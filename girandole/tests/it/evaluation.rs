//! Evaluations: exactly the rows that are asked for, whatever the layout and the size of batches.

use candle_core::{DType, Device, Result, Tensor};
use girandole::comm::Local;
use girandole::models::{CausalLm, Weights};
use girandole::ops::{Documents, RowContext};
use girandole::trainer::{Data, evaluate};
use girandole::training::build::Builder;
use girandole::{Batch, Evaluation, Layout, Parallel};

use crate::common::{LEN, ROWS, Setup, config};

/// Rows of which a different part counts; of row 2 nothing does.
#[derive(Clone, Copy)]
struct Held {
    rows: usize,
    packed: bool,
}

impl Held {
    fn documents(&self, rows: &[usize]) -> Result<Option<Documents>> {
        let of = |row: &usize| vec![1 + *row as u32 % 4, LEN as u32 - 1 - *row as u32 % 4];
        Ok(self.packed.then(|| Documents::new(rows.iter().map(of))).transpose()?)
    }

    fn target(row: usize, place: usize) -> i64 {
        if row == 2 || place < row % 4 { -100 } else { ((row * 5 + place * place * 3) % 48) as i64 }
    }
}

impl Data for Held {
    fn rows(&self) -> usize {
        self.rows
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let of =
            |row: &usize, place: usize| (((row * 7 + place * 11) % 48) as u32, Self::target(*row, place));
        let (tokens, targets): (Vec<u32>, Vec<i64>) =
            rows.iter().flat_map(|row| (0..LEN).map(move |place| of(row, place))).unzip();
        let shape = (rows.len(), LEN);
        Ok(Batch {
            input: Tensor::from_vec(tokens, shape, device)?,
            targets: Tensor::from_vec(targets, shape, device)?,
            documents: self.documents(rows)?,
            preferences: None,
        })
    }
}

/// Returns the loss of the first rows in one process, all at once, and the number of targets.
fn expected(held: Held) -> Evaluation {
    let weights = Weights::random(&config(true), 7).unwrap();
    let builder = Builder::new(weights.tensors(DType::F64, &Device::Cpu));
    let model = CausalLm::new(weights.config(), &builder).unwrap();
    let all: Vec<usize> = (0..held.rows).collect();
    let Batch { input: tokens, targets, documents, .. } = held.batch(&all, &Device::Cpu).unwrap();
    let loss = RowContext { documents, ..RowContext::default() }.scope(|| model.loss(&tokens, &targets));
    let loss = loss.unwrap().to_scalar::<f64>().unwrap();
    let counts = |row: &usize| (0..LEN).filter(|place| Held::target(*row, *place) >= 0).count();
    Evaluation { loss, targets: all.iter().map(counts).sum(), sums: Vec::new(), preferences: None }
}

#[test]
fn exactly_the_rows_that_are_asked_for_count_in_every_layout() {
    let layouts = [
        "", "dp=2", "shard=2", "tp=2", "pp=2", "pp=2,dp=2", "shard=2,tp=2", "pp=2,shard=2,tp=2", "cp=2",
        "dp=2,cp=2", "pp=2,cp=2",
    ];
    // Held-out rows, and how many of them are asked for: fewer than a batch, no multiple of one, and more than there are.
    let asked = [(1, 64), (3, 64), (20, 1), (20, 11), (20, 13), (20, 64)];
    for (layout, packed) in layouts.iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let layout: Layout = layout.parse().unwrap();
        let found = Local::run_shared(layout.ranks(), |comm| {
            let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &layout, None)?;
            let mut found = Vec::new();
            for (held, rows) in asked {
                for size in [1, 3, ROWS, 100] {
                    found.push(evaluate(&mut model, &Held { rows: held, packed }, rows, size)?);
                }
            }
            Ok(found)
        });
        for found in found.unwrap() {
            for (found, (held, rows)) in found.chunks(4).zip(asked) {
                let expected = expected(Held { rows: held.min(rows), packed });
                for found in found {
                    let gap = (found.loss - expected.loss).abs();
                    let what = format!("{layout}, {rows} of {held}: {found:?}, expected {expected:?}");
                    assert!(gap < 1e-10 && found.targets == expected.targets, "{what}");
                }
            }
        }
    }
}

#[test]
fn no_rows_and_rows_without_targets_are_named() {
    let said = Local::run_shared(2, |comm| {
        let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &Layout::copies(2), None)?;
        let mut line = |held, rows| {
            evaluate(&mut model, &Held { rows: held, packed: false }, rows, ROWS).unwrap_err().to_string()
        };
        Ok([line(0, 9), line(9, 0)])
    });
    for line in said.unwrap().concat() {
        assert_eq!(line, "the rows to evaluate on: got 0; give 1 or more");
    }
}
