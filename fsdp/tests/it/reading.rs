//! Range sources: each rank reads only what it keeps, and gets the same values as from a builder of whole parameters.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::common::{Comm, INPUTS, Mlp, builder, numbers, on_all_ranks, start, values};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};
use comm::Mesh;
use fsdp::{Error, Fsdp, FsdpConfig, MixedPrecision, ShardingStrategy, UnitBuilder};
use training::build::RangeReader;

/// Returns ranges of tensors, and records which.
#[derive(Default)]
struct Source {
    tensors: HashMap<String, Tensor>,
    read: Mutex<HashMap<String, Vec<Range<usize>>>>,
    /// Index at which every parameter has a different value in this source.
    odd: Option<usize>,
    fails: bool,
}

impl Source {
    fn new(tensors: HashMap<String, Tensor>) -> Self {
        Self { tensors, ..Self::default() }
    }

    fn count(&self) -> usize {
        self.read.lock().expect("no panic").values().flatten().map(ExactSizeIterator::len).sum()
    }
}

impl RangeReader for Source {
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        _: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        let Some(tensor) = self.tensors.get(name).filter(|tensor| tensor.shape() == shape && !self.fails)
        else {
            bail!("{name} cannot be read")
        };
        self.read.lock().expect("no panic").entry(name.into()).or_default().extend(ranges.iter().cloned());
        let all = numbers([tensor]);
        let number = |place: usize| if self.odd == Some(place) { -5.0 } else { all[place] };
        let read: Vec<f64> = ranges.iter().cloned().flatten().map(number).collect();
        Tensor::new(read, &Device::Cpu)?.to_dtype(dtype)
    }
}

/// A builder without tensors.
fn nothing(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_tensors(HashMap::new(), dtype, &Device::Cpu)
}

#[test]
fn what_is_read_in_parts_is_what_is_given_whole() {
    let half = MixedPrecision { param_dtype: Some(DType::BF16), ..MixedPrecision::default() };
    for (ranks, pack_elements, strategy, mixed_precision) in [
        (1, 16384, ShardingStrategy::FullShard, MixedPrecision::default()),
        (2, 16384, ShardingStrategy::FullShard, MixedPrecision::default()),
        (3, 20, ShardingStrategy::FullShard, half),
        (4, 0, ShardingStrategy::ShardGradOp, MixedPrecision::default()),
        (7, 8, ShardingStrategy::FullShard, MixedPrecision::default()),
        (2, 20, ShardingStrategy::NoShard, MixedPrecision::default()),
    ] {
        on_all_ranks(ranks, |comm| {
            let config = FsdpConfig { pack_elements, strategy, mixed_precision, ..FsdpConfig::default() };
            let whole = Fsdp::new(comm.clone(), builder(1, DType::F32), &config, Mlp::new)?;
            let source = Arc::new(Source::new(start(1, DType::F32)));
            let build = |units: UnitBuilder<'static>| Mlp::new(units.reading(source.clone()));
            let read = Fsdp::new(comm, nothing(DType::F32), &config, build)?;
            assert_eq!(read.shard_ranges(), whole.shard_ranges());
            for ((name, own), (_, other)) in read.named_vars().iter().zip(whole.named_vars()) {
                assert_eq!((own.dims(), own.dtype()), (other.dims(), other.dtype()));
                assert_eq!(numbers([own.as_tensor()]), numbers([other.as_tensor()]), "{name}");
            }
            let x = values(5, &[2, INPUTS], DType::F32);
            assert_eq!(numbers([&read.forward(&x)?]), numbers([&whole.forward(&x)?]));
            Ok(())
        });
    }
}

/// A large parameter, and small ones that share a part.
fn tensors() -> HashMap<String, Tensor> {
    let all = [("large", vec![50, 40]), ("a", vec![100]), ("b", vec![0]), ("c", vec![7])];
    all.map(|(name, dims)| (name.to_string(), values(name.len() as u64, &dims, DType::F32))).into()
}

fn four(units: UnitBuilder<'static>, source: &Arc<Source>) -> Result<()> {
    let build = |vb: VarBuilder<'static>| {
        vb.get((50, 40), "large")?;
        [("a", 100), ("b", 0), ("c", 7)]
            .map(|(name, len)| vb.get(len, name))
            .into_iter()
            .try_for_each(|x| x.map(drop))
    };
    units.reading(source.clone()).unit(build).map(drop)
}

fn config() -> FsdpConfig {
    FsdpConfig { pack_elements: 200, ..FsdpConfig::default() }
}

#[test]
fn each_rank_reads_what_it_keeps() {
    let counts = on_all_ranks(2, |comm| {
        let (rank, source) = (comm.rank(), Arc::new(Source::new(tensors())));
        let fsdp = Fsdp::new(comm, nothing(DType::F32), &config(), |units| four(units, &source))?;
        let read = source.read.lock().expect("no panic").clone();
        // The compared elements, and the kept ones: one half of the small parameters' part per rank.
        let kept =
            [[vec![0..64, 0..1000], vec![0..64, 0..54]], [vec![0..64, 1000..2000], vec![0..64, 54..100]]];
        assert_eq!([&read["large"], &read["a"]], [&kept[rank][0], &kept[rank][1]]);
        assert!(!read.contains_key("b"));
        assert_eq!(read["c"], vec![0..7; rank + 1]);
        assert_eq!(fsdp.named_vars().len(), 4);
        drop(read);
        Ok(source.count())
    });
    assert_eq!(counts.iter().sum::<usize>(), 2000 + 107 + 2 * (64 + 64 + 7));
}

/// Returns the error of each rank if the last rank's source differs.
fn said(
    ranks: usize,
    body: impl Fn(Comm, Arc<Source>) -> fsdp::Result<Fsdp<()>> + Sync,
    odd: Source,
) -> Vec<Error> {
    let odd = Arc::new(odd);
    on_all_ranks(ranks, |comm| {
        let is_last = comm.rank() + 1 == ranks;
        let source = if is_last { odd.clone() } else { Arc::new(Source::new(tensors())) };
        Ok(body(comm, source).map(drop).expect_err("the ranks have other weights"))
    })
}

fn flat(comm: Comm, source: Arc<Source>) -> fsdp::Result<Fsdp<()>> {
    Fsdp::new(comm, nothing(DType::F32), &config(), |units| four(units, &source))
}

fn hybrid(comm: Comm, source: Arc<Source>) -> fsdp::Result<Fsdp<()>> {
    let mesh = Mesh::new(comm, &[("dp", 2), ("shard", 2)])?;
    Fsdp::hybrid(&mesh, ("shard", "dp"), nothing(DType::F32), &config(), |units| four(units, &source))
}

#[test]
fn ranks_that_read_other_files_are_told_on_every_rank() {
    let odd = |place| Source { odd: Some(place), ..Source::new(tensors()) };
    // First within the compared elements; then beyond them, where another rank keeps the same shard.
    for found in [said(2, flat, odd(3)), said(4, hybrid, odd(3)), said(4, hybrid, odd(1999))] {
        for error in &found {
            let line = error.to_string();
            let odd_rank = found.len() - 1;
            assert!(matches!(error, Error::ModelMismatch(found) if found.odd_rank == odd_rank), "{line}");
            assert!(
                line.contains("values of hash") && line.ends_with("all must read the same files"),
                "{line}"
            );
        }
    }
}

#[test]
fn a_rank_that_cannot_read_is_named_on_every_rank() {
    let found = said(3, flat, Source { fails: true, ..Source::new(tensors()) });
    for error in &found[..2] {
        assert!(matches!(error, Error::PeerFailed { rank: 2, .. }) && error.is_peer_failure(), "{error}");
        assert!(error.to_string().contains("large cannot be read"), "{error}");
    }
    assert!(
        !found[2].is_peer_failure() && found[2].to_string().contains("large cannot be read"),
        "{}",
        found[2]
    );
}
