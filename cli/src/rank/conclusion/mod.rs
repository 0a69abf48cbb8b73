//! The end of a rank: the result of the run is given, whichever ranks are lost meanwhile.

use std::path::Path;
use std::time::Duration;

use comm::{Operation, gather_object};
use report::trace::{self, RankTrace};

use super::{Rank, RankPhase};
use crate::console::note;
use crate::error::{Error, Result};
use crate::options::ElasticRanks;
use crate::outputs;

/// Ends a rank that is not needed any more as one that has done its part.
pub(crate) fn leave(error: Error) -> Result<()> {
    match &error {
        Error::Parallel(reason) if matches!(**reason, girandole::Error::NotNeeded { .. }) => {
            note(format_args!("{reason}"));
            Ok(())
        }
        _ => Err(error),
    }
}

impl Rank {
    /// Ends the run: the first rank writes the trace of all ranks, if it was recorded, and passes the result to `report`.
    /// In an elastic run no rank returns before that is done. If the first rank is lost, the one that replaces it does
    /// it, unless a rank that is left knows that it was done.
    ///
    /// So a result is never missing while a rank is left to report it. It is reported twice if the first rank is lost
    /// after reporting it and before saying so. A rank that is lost later had nothing left to do; if no other one is at
    /// work any more, its launcher cannot know that, and the job fails.
    pub(crate) fn conclude(
        &mut self,
        elastic: Option<ElasticRanks>,
        timeout: Duration,
        trace: Option<(RankTrace, &Path)>,
        report: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let (limit, mut report) = (elastic.map(|_| timeout), Some(report));
        let ended = self.conclude_in_group(limit, trace.as_ref(), &mut report).or_else(|error| {
            self.after_loss(elastic, error, |rank, _, _| {
                rank.exchange_phases()?;
                rank.conclude_in_group(limit, trace.as_ref(), &mut report)
            })
        });
        match ended {
            // Nothing is left to do.
            Err(_) if self.phase == RankPhase::Concluded => Ok(()),
            ended => ended,
        }
    }

    /// Does what is left to do in the current group. `limit` is the time-out, in an elastic run; `report` is taken when it
    /// is called.
    fn conclude_in_group<R: FnOnce(&Self) -> Result<()>>(
        &mut self,
        limit: Option<Duration>,
        trace: Option<&(RankTrace, &Path)>,
        report: &mut Option<R>,
    ) -> Result<()> {
        if self.phase < RankPhase::Concluded {
            if self.is_first() {
                self.write_missing_summary()?;
            }
            let traces = trace.map(|(own, _)| gather_object(&*self.comm, own, 0)).transpose()?.flatten();
            let give = || {
                let Some(report) = report.take() else { return Ok(()) };
                if let (Some((_, path)), Some(traces)) = (trace, traces) {
                    outputs::write(path, trace::merge(&traces)?)?;
                }
                report(self)
            };
            match limit {
                Some(limit) => drop(self.first_alone(limit, give)?),
                None if self.is_first() => give()?,
                None => {}
            }
            self.phase = RankPhase::Concluded;
        }
        match limit {
            // A rank that knows that the result was reported stays until all others know it too.
            Some(_) => Ok(self.comm.run(Operation::Barrier)?),
            None => Ok(()),
        }
    }

    /// Writes the summary, if the rank that was to write it is lost and has not done so.
    fn write_missing_summary(&mut self) -> Result<()> {
        let Some((run, seconds)) = self.unwritten.take() else { return Ok(()) };
        let Some(mut metrics) = self.metrics.take() else { return Ok(()) };
        if !metrics.has_summary(run)? {
            self.write_summary(run, Some(&mut metrics), seconds)?;
        }
        self.metrics = Some(metrics);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
