//! How long training stands still for a checkpoint of 115 million parameters, written at once and in the background, and how long steps take
//! beside it: `cargo bench -p girandole --bench checkpoints`. It needs 6 GB of memory and of disk.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/background/run.rs"]
mod run;

use run::{Rows, train};

fn main() {
    let (rows, sizes) = (Rows { len: 64, tokens: 257 }, (257, 896, 12));
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    for layout in ["", "shard=2"] {
        let (_, plain) = train((layout, sizes), &rows, (6, 1), None);
        println!("layout {layout:?}: a step takes {:.3} s", mean(&plain[1..]));
        for in_background in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (summary, times) = train((layout, sizes), &rows, (24, 12), Some((dir.path(), in_background)));
            println!(
                "in background {in_background}: {:.3} s a checkpoint, {:.3} s at the end; the 8 steps after it take {:.3} s each",
                summary.checkpoint_seconds / summary.checkpoints as f64,
                summary.last_checkpoint_seconds,
                mean(&times[12..20])
            );
        }
    }
}
