//! The checkpoint that a run goes on from: rank 0 chooses it for all ranks, and it is of the same command.

use comm::broadcast_object;
use girandole::trainer::CheckpointExtra;
use training::Contents;

use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, with_fallback_hint};
use crate::rank::Rank;

/// Key of the command in the settings of a checkpoint.
pub(crate) const COMMAND: &str = "command";

/// Opens the checkpoint that rank 0 chose, on every rank, for each to read a part of it.
///
/// # Errors
/// Those of `find`; a checkpoint that some rank cannot see.
pub(crate) fn first_choice(
    options: &CheckpointOptions,
    rank: &Rank,
    find: impl FnOnce() -> Result<Option<Contents>>,
) -> Result<Option<Contents>> {
    let (true, Some(checkpoints)) = (options.resumes(), options.open()?) else { return Ok(None) };
    let own = if rank.is_first() { find()? } else { None };
    let chosen = own.map(|contents| options.to_ref(&contents.folder));
    let chosen = broadcast_object(&*rank.comm, &chosen, 0)?;
    let open = |chosen| checkpoints.contents(&options.folder_of(&chosen)).map_err(with_fallback_hint);
    chosen.map(open).transpose()
}

/// Rejects a checkpoint of another command of this program, whatever its other contents.
///
/// # Errors
/// It is of another command, or of another program.
pub(crate) fn agree_on_command(own: &str, contents: &Contents, options: &CheckpointOptions) -> Result<()> {
    let command = CheckpointExtra::of(contents)?.settings.remove(COMMAND);
    let Some(command) = command.filter(|command| command != own) else { return Ok(()) };
    let (option, got) = options.source();
    let help = format!("that is of the command {command}, and this is {own}");
    Err(Error::Contradiction { option: option.into(), got: got.display().to_string(), help })
}
