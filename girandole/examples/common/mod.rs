//! What examples of models in every layout have in common.

use std::process::ExitCode;

use girandole::launch::RankContext;
use girandole::{Layout, launch};

/// Runs `train` on the ranks of the layout that the program's first argument names; two copies unless given.
pub(crate) fn run_in_layout(train: fn(RankContext, &Layout) -> girandole::Result<()>) -> ExitCode {
    match std::env::args().nth(1).unwrap_or("dp=2".into()).parse::<Layout>() {
        Ok(layout) => launch::run(layout.ranks(), |context| train(context, &layout)),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
