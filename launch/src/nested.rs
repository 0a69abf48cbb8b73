//! Nesting check: refuses ranks that would start ranks of the same program, which would do so again, without end.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use comm::launcher::digest;
use comm::launcher::is_worker;
use comm::{Error, LaunchedRank, Result};

use crate::SpawnConfig;

/// Variable with the digests of the commands that the launchers above a rank have started.
pub(super) const COMMANDS: &str = "GIRANDOLE_COMMANDS";
const HELP: &str = "this process is a rank itself, and its ranks would start ranks in their turn, without end; call \
                    launch::run, which starts ranks only where there are none";
const HELP_STARTED: &str = "this process was started as a rank, and each rank would start a job of its own; call launch::run, \
                            which starts ranks only where there are none";

/// Maximum depth of nested launchers. Catches a program that starts itself with other arguments each time.
const MAX_DEPTH: usize = 4;

impl SpawnConfig {
    /// Refuses to start the command that this process is a rank of, and nesting that is too deep.
    pub(super) fn check_nesting(&self) -> Result<()> {
        // A process that starts another program may want one job of it for each rank.
        if let (Ok(Some(LaunchedRank { rank, world_size: 2.., .. })), None, false) =
            (LaunchedRank::from_env(), &self.program, is_worker())
        {
            return Err(Error::invalid("spawn", format!("a call in rank {rank}"), HELP_STARTED));
        }
        let rank = env::var_os("RANK").filter(|_| is_worker());
        let refuse = |got: String| Err(Error::invalid("spawn", got, HELP));
        match rank {
            Some(rank) if self.program.is_none() => {
                refuse(format!("a call in rank {}", rank.to_string_lossy()))
            }
            _ if outer_commands().split(':').any(|command| command == self.command()) => {
                refuse("the command that this process is a rank of".into())
            }
            _ if depth(&outer_commands()) >= MAX_DEPTH => {
                refuse(format!("a call below {MAX_DEPTH} launchers"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the digests of the commands of all launchers above the ranks to be started, for their environment.
    pub(super) fn commands(&self) -> String {
        match outer_commands() {
            above if above.is_empty() => self.command(),
            above => format!("{above}:{}", self.command()),
        }
    }

    /// Returns a digest of the command: the same for the same program with the same arguments.
    fn command(&self) -> String {
        let program = match &self.program {
            Some(program) => program.canonicalize().unwrap_or_else(|_| program.clone()),
            None => env::current_exe().unwrap_or_else(|_| PathBuf::new()),
        };
        let args = self.arguments();
        let words = std::iter::once(program.as_os_str()).chain(args.iter().map(OsString::as_os_str));
        // 256 ends each word; no byte of a word has that value.
        let numbers = |word: &OsStr| {
            word.as_encoded_bytes().iter().map(|&byte| usize::from(byte)).chain([256]).collect::<Vec<_>>()
        };
        format!("{:x}", digest(words.flat_map(numbers)))
    }
}

/// Returns the digests of what the launchers above this process have started, outermost first.
fn outer_commands() -> String {
    env::var(COMMANDS).ok().filter(|_| is_worker()).unwrap_or_default()
}

fn depth(commands: &str) -> usize {
    commands.split(':').filter(|command| !command.is_empty()).count()
}
