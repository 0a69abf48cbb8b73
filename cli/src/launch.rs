//! `girandole launch`: starts any program as the ranks of a job on one machine or several, like `torchrun`.

use std::io::IsTerminal;

use launch::command::LaunchOptions;
use report::trace;

use crate::console::note;
use crate::error::{Error, Result};
use crate::start::{SPAWNED_FOR, spawn_with_bar};

/// Runs the program as ranks, and waits until all have ended.
///
/// # Errors
/// Options that cannot be used, a program that cannot be run, the first rank that failed.
pub fn run(options: &LaunchOptions) -> Result<()> {
    trace::install(false)?;
    let ended = options.run(|mut config| {
        // Overrides an inherited value: no launcher prints the final lines for these ranks.
        config.env.push((SPAWNED_FOR.into(), "".into()));
        if let Some(logs) = config.logs.as_ref().filter(|logs| !logs.show_stdout && !logs.show_stderr) {
            note(format_args!(
                "what the ranks print goes to files in {}; with --tee it is shown, too",
                logs.dir.display()
            ));
        }
        let ended = spawn_with_bar(config);
        if is_input_left() {
            note(format_args!(
                "the standard input of launch is not passed on to the ranks, and nobody has read it"
            ));
        }
        ended
    });
    ended.map(drop).map_err(|error| match error {
        launch::Error::Worker(failure) => Error::Launched(failure),
        error => error.into(),
    })
}

/// True if standard input has unread data from a pipe or a file. Input typed at a terminal is ignored: the next
/// program reads it.
fn is_input_left() -> bool {
    let input = std::io::stdin();
    !input.is_terminal() && rustix::io::ioctl_fionread(&input).is_ok_and(|bytes| bytes > 0)
}
