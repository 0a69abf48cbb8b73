//! Checks of a job's configuration before anything is started.

use comm::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{ElasticJob, LogConfig, SpawnConfig};

/// Files that a process has open apart from those that the launcher needs for each rank.
const FILES_ASIDE: u64 = 32;
/// Files for each rank: two pipes and a process handle.
const FILES_PER_RANK: u64 = 3;
/// Files for a rank that may be started later: both ends of two pipes.
const FILES_PER_SPARE: u64 = 4;
/// Additional files for each rank whose output is logged: one for each stream.
const LOGS_PER_RANK: u64 = 2;

impl SpawnConfig {
    /// Checks the configuration before anything is started, as [`spawn`](super::spawn) does, and raises the limit on open files to
    /// what the system allows this process. For programs that do other
    /// work first and want to report errors before that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a world size of 0; a `RAYON_NUM_THREADS` that makes no sense; more ranks and replacements than the limit on open files allows,
    /// pipes and logs included; inconsistent node settings; a local rank to show that there is not; a log folder that cannot be created; a call in a rank that
    /// would start its own program again, or launchers that are nested too deeply.
    ///
    /// ```
    /// use launch::SpawnConfig;
    ///
    /// assert!(SpawnConfig { world_size: 2, ..SpawnConfig::default() }.check().is_ok());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(Error::invalid("world_size", 0, "at least 1 rank is needed"));
        }
        self.check_nesting()?;
        self.check_nodes()?;
        self.elastic.as_ref().map_or(Ok(()), |elastic| elastic.check(self))?;
        self.check_shown_ranks()?;
        self.check_threads()?;
        self.logs.as_ref().map_or(Ok(()), LogConfig::check)?;
        raise_file_limit().map_or(Ok(()), |files| self.check_files(files))
    }

    /// Checks the settings that concern several nodes.
    fn check_nodes(&self) -> Result<()> {
        let Self { nodes, node_rank, world_size, master_port, .. } = *self;
        if nodes == 0 || !world_size.is_multiple_of(nodes) {
            return Err(Error::invalid(
                "nodes",
                nodes,
                format!("{world_size} ranks are the same number on each"),
            ));
        }
        if node_rank >= nodes {
            return Err(Error::invalid(
                "node_rank",
                node_rank,
                format!("with {nodes} nodes, give 0 to {}", nodes - 1),
            ));
        }
        if nodes > 1 && master_port == 0 {
            let help = "several nodes need a port to meet at: give 1 to 65535, the same on each";
            return Err(Error::invalid("master_port", 0, help));
        }
        Ok(())
    }

    /// Checks that the ranks whose output is to be shown are ranks of this machine.
    fn check_shown_ranks(&self) -> Result<()> {
        let local = self.local_world_size() + self.spares();
        let wrong = self.shown_ranks.iter().flatten().find(|&&rank| rank >= local);
        wrong.map_or(Ok(()), |&rank| {
            let help = format!("the local ranks of this machine are 0 to {}", local.saturating_sub(1));
            Err(Error::invalid("shown_ranks", rank, help))
        })
    }

    /// Checks that a limit of `files` open files is enough for all ranks, their logs and the replacements.
    fn check_files(&self, files: u64) -> Result<()> {
        let logs = if self.logs.is_some() { LOGS_PER_RANK } else { 0 };
        let (ranks, spares) = (self.local_world_size() as u64, self.spares() as u64);
        let (per_rank, per_spare) = (FILES_PER_RANK + logs, FILES_PER_SPARE + logs);
        let room = files.saturating_sub(FILES_ASIDE) / per_rank;
        if ranks > room {
            let of_each = if self.logs.is_some() { " with their logs" } else { "" };
            let help = format!(
                "this process may have {files} files open, enough for {room} ranks on this machine{of_each}; start \
                 fewer, or raise the limit (ulimit -n)"
            );
            return Err(Error::invalid("world_size", ranks, help));
        }
        let room = files.saturating_sub(FILES_ASIDE + ranks * per_rank) / per_spare;
        if spares > room {
            let help = format!(
                "this process may have {files} files open, enough to replace {room} ranks beside the first {ranks}; \
                 replace fewer, or raise the limit (ulimit -n)"
            );
            return Err(Error::invalid("elastic.replace", spares, help));
        }
        Ok(())
    }
}

impl ElasticJob {
    fn check(&self, config: &SpawnConfig) -> Result<()> {
        if config.nodes > 1 && self.replace > 0 {
            let help =
                "new ranks find the group through a file of their node; on several nodes none can come";
            return Err(Error::invalid("elastic.replace", self.replace, help));
        }
        if self.min == 0 || self.min > config.world_size {
            let help = format!("the fewest ranks that go on: 1 to {}", config.world_size);
            return Err(Error::invalid("elastic", self.min, help));
        }
        Ok(())
    }
}

/// Raises the number of files that this process, and with it the ranks, may have open to what the system allows it, and
/// returns that number; `None` if there is no limit.
fn raise_file_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    // Where the system refuses, the earlier limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ranks_and_too_many_are_refused() {
        let none = SpawnConfig { world_size: 0, ..SpawnConfig::default() }.check().unwrap_err();
        assert_eq!(none.to_string(), "world_size: got 0; at least 1 rank is needed");
        if raise_file_limit().is_some() {
            let many = SpawnConfig { world_size: usize::MAX, ..SpawnConfig::default() }.check().unwrap_err();
            assert!(many.to_string().contains("ulimit -n"), "{many}");
        }
    }

    #[test]
    fn logs_and_replacements_need_files_too() {
        let ranks = |world_size, replace, logs: bool| SpawnConfig {
            world_size,
            elastic: (replace > 0).then(|| ElasticJob { replace, ..ElasticJob::default() }),
            logs: logs.then(LogConfig::default),
            ..SpawnConfig::default()
        };
        let said = |config: SpawnConfig| config.check_files(64).map_err(|error| error.to_string());
        assert_eq!((said(ranks(10, 0, false)), said(ranks(6, 0, true))), (Ok(()), Ok(())));
        assert_eq!(
            said(ranks(10, 0, true)).unwrap_err(),
            "world_size: got 10; this process may have 64 files open, enough for 6 ranks on this machine with their logs; \
             start fewer, or raise the limit (ulimit -n)"
        );
        assert_eq!((said(ranks(4, 5, false)), said(ranks(2, 3, true))), (Ok(()), Ok(())));
        assert_eq!(
            said(ranks(4, 6, false)).unwrap_err(),
            "elastic.replace: got 6; this process may have 64 files open, enough to replace 5 ranks beside the first 4; \
             replace fewer, or raise the limit (ulimit -n)"
        );
        assert!(said(ranks(2, 4, true)).unwrap_err().starts_with("elastic.replace: got 4; "));
    }
}
