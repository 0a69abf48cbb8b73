//! The options of `comm-bench`.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Result, refuse};
use crate::memory_check;
use crate::options::{DeviceKind, RankOptions, count, seconds};
use candle_core::DType;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use plan::measure::{Measured, size};

/// Options of `comm-bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Each call follows a barrier, which is not measured. The time is that on rank 0, the median over the
calls. A size is that of the whole buffer: for all_gather, reduce_scatter, gather, scatter and
all_to_all, of the parts of all ranks together. GB/s is that size divided by the time, in 10^9 bytes.
Bus GB/s can be compared with the bandwidth of a link, for any operation and any number P of ranks: as
in nccl-tests, it is GB/s times 2(P-1)/P for all_reduce, times (P-1)/P for operations with parts, and
GB/s itself for the others.

--json FILE gets one object per line: op, world, bytes, s (the median in seconds), calls, gb_s,
bus_gb_s.

  girandole comm-bench --world-size 4 --ops all_reduce --sizes 1M,16M")]
pub struct CommBenchOptions {
    #[command(flatten)]
    pub(crate) ranks: RankOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "auto", help_heading = "Ranks")]
    pub(crate) device: DeviceKind,
    /// Operations to measure, separated by commas
    #[arg(
        long,
        value_name = "OPS",
        value_parser = operation(),
        value_delimiter = ',',
        default_value = "all_reduce,all_gather,reduce_scatter,broadcast"
    )]
    pub(crate) ops: Vec<Measured>,
    /// Sizes in bytes; K is 1024, M and G likewise
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = size::parse, default_value = "4K,64K,1M,16M,64M")]
    pub(crate) sizes: Vec<usize>,
    /// Element type: f32, f64, f16, bf16, u8, u32 or i64
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub(crate) dtype: DType,
    /// Approximate time to measure each operation and size
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    pub(crate) seconds: Duration,
    /// Calls to measure per operation and size, in place of --seconds
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "seconds")]
    pub(crate) calls: Option<usize>,
    /// File for the results, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

fn operation() -> impl TypedValueParser<Value = Measured> {
    let value = |operation: Measured| PossibleValue::new(operation.name()).help(operation.description());
    PossibleValuesParser::new(Measured::ALL.map(value))
        .try_map(|name| Measured::named(&name).ok_or("there is no such operation"))
}

fn dtype(text: &str) -> std::result::Result<DType, &'static str> {
    let known = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64];
    known.into_iter().find(|dtype| dtype.as_str() == text).ok_or("give f32, f64, f16, bf16, u8, u32 or i64")
}

impl CommBenchOptions {
    /// Checks that sizes are whole numbers of elements and that the buffers of all ranks here fit in memory.
    pub(super) fn check(&self, world_size: usize) -> Result<()> {
        let size = self.dtype.size_in_bytes();
        if let Some(bytes) = self.sizes.iter().find(|bytes| !bytes.is_multiple_of(size)) {
            let help =
                format!("give multiples of {size}, the bytes of an element of {}", self.dtype.as_str());
            return refuse("--sizes", bytes, help);
        }
        let Some(here) = memory_check::ranks_on_host(&self.ranks, self.device, world_size) else {
            return Ok(());
        };
        self.cases(world_size).into_iter().try_for_each(|(op, bytes)| {
            let all = bytes as f64 * op.buffers(world_size);
            memory_check::check_data("--sizes", bytes, all / world_size.max(1) as f64, here)
        })
    }

    /// Returns the operations and sizes to measure, in the order of output. A barrier has one case, of size 0.
    pub(super) fn cases(&self, world_size: usize) -> Vec<(Measured, usize)> {
        let sizes = |op: Measured| if op == Measured::Barrier { &[0][..] } else { &self.sizes[..] };
        let possible = |op: &Measured| world_size > 1 || *op != Measured::SendRecv;
        self.ops
            .iter()
            .copied()
            .filter(possible)
            .flat_map(|op| sizes(op).iter().map(move |&b| (op, b)))
            .collect()
    }
}
