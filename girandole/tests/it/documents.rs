//! Packed rows in layouts: what a document's tokens reach, and what is refused.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::{Chain, LEN, ROWS, Setup, documents_of, own_rows};
use candle_core::{DType, Device, Tensor};
use girandole::comm::{Communicator, Local};
use girandole::context_parallel::ContextParallel;
use girandole::ops::{Documents, RowContext};
use girandole::training::GradientCheckConfig;
use girandole::training::build::{Builder, Division, Linear, LinearConfig};
use girandole::{Batch, InitialWeights, Layout, Parallel, ParallelConfig};

/// One token of one document changes the logits of this document from there on, and no others, in every layout.
#[test]
fn a_changed_token_changes_its_document_alone() {
    const LEN: usize = 16;
    let layouts = [
        ("", false),
        ("dp=2", false),
        ("shard=2", false),
        ("tp=2", false),
        ("tp=2", true),
        ("pp=2", false),
        ("pp=2,tp=2", true),
        ("pp=2,shard=2,tp=2", false),
        ("cp=2", false),
        ("cp=3", false),
        ("cp=4,tp=2", true),
        ("shard=2,cp=2", false),
        ("pp=2,cp=2", false),
    ];
    let documents = Documents::new([vec![5, 1, 6, 2], vec![16]]).unwrap();
    for (layout, gpt2) in layouts.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let ((layout, sequence_parallel), mut differs) = (layout, Vec::new());
        let layout: Layout = layout.parse().unwrap();
        let setup = Setup { gpt2, sequence_parallel, len: LEN, ..Setup::default() };
        let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<Vec<Vec<usize>>> {
            let mut parallel = setup.parallel(comm.clone(), &layout, None)?;
            let context = ContextParallel::new(layout.mesh(comm)?.axis("cp")?.clone());
            let multiple = if sequence_parallel { layout.tp } else { 1 };
            let divided = context.in_multiples_of(multiple).divide(LEN, Some(&documents))?;
            let rows = RowContext {
                documents: Some(documents.clone()),
                divided: (layout.cp > 1).then(|| divided.clone()),
                ..RowContext::default()
            };
            let mut logits = |changed: Option<usize>| -> girandole::Result<Vec<Vec<f64>>> {
                let token = |at: usize| if changed == Some(at) { 47 } else { (at * 7 % 40) as u32 };
                let tokens = Tensor::from_iter((0..2 * LEN).map(token), &Device::Cpu)?.reshape((2, LEN))?;
                let tokens = divided.part_of(&tokens)?;
                let logits = rows.scope(|| match parallel.stages()? {
                    Some(mut stages) => stages.forward(&tokens, |logits| Ok(logits.clone())),
                    None => Ok(parallel.model()?.unwrap().logits(&tokens)?),
                })?;
                Ok(divided.whole_of(&logits)?.flatten_to(1)?.to_vec2()?)
            };
            let before = logits(None)?;
            let places = [0, 4, 5, 6, 8, 12, 14, 15];
            let mut all = Vec::new();
            for place in places {
                let after = logits(Some(place))?;
                all.push((0..2 * LEN).filter(|at| before[*at] != after[*at]).collect());
            }
            Ok(all)
        };
        for found in Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap() {
            differs = found;
            let ends = [(0, 5), (4, 5), (5, 6), (6, 12), (8, 12), (12, 14), (14, 15), (15, 16)];
            let expected: Vec<Vec<usize>> =
                ends.into_iter().map(|(place, end)| (place..end).collect()).collect();
            assert_eq!(differs, expected, "{layout}, {setup:?}");
        }
        assert!(!differs.is_empty());
    }
}

/// The loss of packed rows is that of the documents, each alone in a row.
#[test]
fn the_loss_is_that_of_the_documents_alone() {
    for gpt2 in [false, true] {
        let setup = Setup { gpt2, packed: true, ..Setup::default() };
        let losses = Local::run_shared(1, |comm| {
            let mut parallel = setup.parallel(comm, &"".parse()?, None)?;
            let batch = own_rows(&parallel, 1, &setup)?;
            let (mut sum, mut count) = (0.0, 0);
            let model = parallel.model()?.unwrap();
            for (row, lengths) in documents_of(1, LEN).iter().enumerate() {
                let mut first = 0;
                for len in lengths.iter().map(|len| *len as usize) {
                    let part = |all: &Tensor| all.narrow(0, row, 1)?.narrow(1, first, len)?.contiguous();
                    let targets = part(&batch.targets)?;
                    let own = targets.flatten_all()?.to_vec1::<i64>()?.iter().filter(|at| **at >= 0).count();
                    if own > 0 {
                        sum += model.loss(&part(&batch.input)?, &targets)?.to_scalar::<f64>()? * own as f64;
                    }
                    (first, count) = (first + len, count + own);
                }
            }
            let step = parallel.step_batch(&batch)?;
            let config = GradientCheckConfig::default();
            let check = parallel.check_gradient(&batch, &step, &config)?;
            assert!(check.lost.is_empty(), "{check}");
            Ok([sum / count as f64, step.loss, parallel.evaluate_batch(&batch)?.loss])
        });
        let [alone, trained, evaluated] = losses.unwrap()[0];
        assert!(
            (alone - trained).abs() < 1e-10 && (alone - evaluated).abs() < 1e-10,
            "{alone} {trained} {evaluated}"
        );
    }
}

/// A model in which no attention asks for the documents is refused, in stages too, by every rank.
#[test]
fn documents_that_nothing_asks_for_are_named() {
    for layout in ["", "dp=2", "shard=2", "pp=2"] {
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let build = |builder: &Builder| {
                let unit = |at: usize| {
                    builder.unit(&at.to_string(), |part| {
                        part.pp(at).linear(&LinearConfig::new(4, 4, Division::Outputs).with_bias(false))
                    })
                };
                Ok(Chain::<Linear>((0..2).map(unit).collect::<candle_core::Result<_>>()?))
            };
            let config = ParallelConfig { dtype: DType::F64, ..ParallelConfig::default() };
            let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(1), &config, build)?;
            let x = Tensor::ones((2, 4), DType::F64, &Device::Cpu)?;
            let plain = Batch::from((x.clone(), x));
            parallel.step_batch(&plain)?;
            let packed = Batch { documents: Some(Documents::new(vec![vec![4]; 2]).unwrap()), ..plain };
            Ok(parallel.step_batch(&packed).unwrap_err().to_string())
        });
        let said: BTreeSet<String> = said.unwrap().into_iter().collect();
        let said: Vec<String> = said.into_iter().collect();
        let begin = "the model's attention: got none that asks for the documents of a batch; ";
        assert!(said.len() == 1 && said[0].starts_with(begin), "{layout}: {said:?}");
    }
}

#[test]
fn documents_of_other_rows_are_named() {
    let said = Local::run_shared(2, |comm| {
        let mut parallel = Setup::default().parallel(comm, &"dp=2".parse()?, None)?;
        let batch = own_rows(&parallel, 0, &Setup::default())?;
        let documents = Some(Documents::new([vec![LEN as u32]]).unwrap());
        Ok(parallel.step_batch(&Batch { documents, ..batch }).unwrap_err().to_string())
    });
    for said in said.unwrap() {
        let expected = format!(
            "the documents of a batch: got those of 1 rows; the input has {} rows: give as many",
            ROWS / 2
        );
        assert_eq!(said, expected);
    }
}
