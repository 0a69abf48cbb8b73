//! Timing of attention at one length, forward and backward; `benches/pytorch/attention.py` compares it with PyTorch.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{Write, stdout};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor, Var};
use clap::Parser;
use ops::tape::scalar_with_gradient;
use ops::{AttentionConfig, AttentionMask, Documents, attention, backward};

/// The same allocator as in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Times causal attention of one length, forward and backward in f32, and prints seconds of a pass and the growth of peak memory in MiB.
#[derive(Parser)]
struct Options {
    /// Queries and keys.
    length: usize,
    /// Heads.
    #[arg(long, default_value = "8")]
    heads: usize,
    /// Width of a head.
    #[arg(long, default_value = "64")]
    width: usize,
    /// Documents of equal length in the row, which do not see each other.
    #[arg(long, default_value = "1")]
    documents: usize,
    /// How long to measure.
    #[arg(long, default_value = "1")]
    seconds: f64,
}

fn peak_mib() -> std::io::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.unwrap_or_default() / 1024.0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let Options { length, heads, width, documents, seconds } = Options::parse();
    let draw = || Tensor::randn(0f32, 1.0, (1, length, heads * width), &Device::Cpu);
    let qkv = [Var::from_tensor(&draw()?)?, Var::from_tensor(&draw()?)?, Var::from_tensor(&draw()?)?];
    let weights = draw()?;
    let config = AttentionConfig::new(heads, AttentionMask::Causal);
    let documents = Documents::new([vec![(length / documents) as u32; documents]])?;
    let pass = || -> candle_core::Result<()> {
        let [q, k, v] = &qkv;
        let mixed = documents.scope(|| attention(q, k, v, &config))?;
        backward(&scalar_with_gradient(&mixed, weights.clone())?).map(drop)
    };
    let before = peak_mib()?;
    // Warm-up pass, which touches new memory; not counted.
    pass()?;
    let (end, mut times) = (Instant::now() + Duration::try_from_secs_f64(seconds)?, Vec::new());
    while Instant::now() < end || times.len() < 3 {
        let began = Instant::now();
        pass()?;
        times.push(began.elapsed());
    }
    times.sort();
    writeln!(stdout(), "{} {}", times[times.len() / 2].as_secs_f64(), peak_mib()? - before)?;
    Ok(())
}
