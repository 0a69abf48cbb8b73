//! Failure reports: a rank that stops reports the cause to those that wait for it, so that all return the same cause.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, Work};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, Table};

/// Bytes of a report: small enough that every transport buffers it without waiting for the receiver.
const REPORT_BYTES: usize = 2048;
/// How long to wait until the world group reports the first failure.
const WORLD_TIMEOUT: Duration = Duration::from_millis(600);
/// How long to wait for a neighbour to report why it, or a rank beyond it, has left.
const NEIGHBOUR_TIMEOUT: Duration = Duration::from_secs(5);

const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Groups for failure reports: two groups of two with each neighbour, with each rank that has variables tied to this rank's,
/// and with each data-parallel replica. They are unused until something fails. They have two members each, so that a report
/// does not depend on other ranks, which may leave.
pub(crate) struct FailureReports {
    world: Arc<dyn Communicator>,
    /// By rank in the whole job.
    neighbours: BTreeMap<usize, Neighbour>,
    sent: Mutex<Vec<Work>>,
}

/// One group per direction: a group runs its operations in order, so an unanswered receive would block this rank's own
/// report.
struct Neighbour {
    sending: Arc<dyn Communicator>,
    receiving: Arc<dyn Communicator>,
}

/// The cause that a rank reports when it stops.
#[derive(Debug, Serialize, Deserialize)]
enum Cause {
    /// A rank died.
    Died { rank: usize, host: String },
    /// A rank failed.
    Failed { rank: usize, reason: String },
}

impl FailureReports {
    /// Creates the groups. Every rank must call it. `tied` are pairs of ranks, lower one first, that wait for each other
    /// because of tied variables; all ranks of `copies` wait for each other, too.
    pub(crate) fn new(
        world: Arc<dyn Communicator>,
        table: &Table,
        tied: &BTreeSet<(usize, usize)>,
        copies: Option<&dyn Communicator>,
    ) -> Result<Self> {
        let pairs = table.owners.windows(2).map(|pair| (pair[0].min(pair[1]), pair[0].max(pair[1])));
        let pairs = pairs.chain(tied.iter().copied());
        // The same order on all ranks, so that no two wait for each other.
        let pairs: BTreeSet<(usize, usize)> = pairs.filter(|(a, b)| a != b).collect();
        let mut neighbours = BTreeMap::new();
        create_pair_groups(&*world, pairs, &mut neighbours)?;
        if let Some(copies) = copies {
            let all = 0..copies.world_size();
            create_pair_groups(
                copies,
                all.clone().flat_map(|a| (a + 1..all.end).map(move |b| (a, b))),
                &mut neighbours,
            )?;
        }
        Ok(Self { world, neighbours, sent: Mutex::default() })
    }

    /// Reports to the ranks that wait for this one why it stops, without waiting for them. They report to theirs in turn.
    pub(crate) fn report(&self, error: &Error) {
        let cause = match error {
            Error::Comm(comm::Error::PeerDied { rank, host, .. }) => {
                Cause::Died { rank: *rank, host: host.clone() }
            }
            Error::PeerFailed { rank, reason } => Cause::Failed { rank: *rank, reason: reason.clone() },
            // The other ranks can determine this cause themselves.
            error if error.is_peer_failure() => return,
            error => {
                let rank = self.world.world_ranks()[self.world.rank()];
                Cause::Failed { rank, reason: error.to_string() }
            }
        };
        let Ok(text) = encode(&cause) else { return };
        // A neighbour that has left as well needs no report.
        let works = self
            .neighbours
            .values()
            .filter_map(|Neighbour { sending, .. }| sending.send(&text, 1 - sending.rank()).ok());
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).extend(works);
    }

    /// Replaces the error "peer left" by the cause, if the peer or the world group reports one.
    pub(crate) fn cause(&self, error: comm::Error) -> Error {
        let comm::Error::PeerLeft { rank: left, operation, .. } = &error else { return error.into() };
        let reported = match self.neighbours.get(left) {
            Some(neighbour) => self.wait_for_report([neighbour], operation),
            None => self.wait_for_report(self.neighbours.values(), operation),
        };
        if let Some(cause) = reported {
            return cause;
        }
        let began = Instant::now();
        while began.elapsed() < WORLD_TIMEOUT {
            if let Err(first) = self.first_cause() {
                return first.into();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        error.into()
    }

    /// Waits for the first of these neighbours that reports a cause.
    fn wait_for_report<'a>(
        &self,
        neighbours: impl IntoIterator<Item = &'a Neighbour>,
        operation: &str,
    ) -> Option<Error> {
        let mut questions: Vec<PendingReport> = neighbours
            .into_iter()
            .filter_map(|Neighbour { receiving, .. }| post_receive(receiving).ok())
            .collect();
        let began = Instant::now();
        while !questions.is_empty() && began.elapsed() < NEIGHBOUR_TIMEOUT {
            let (open, done): (Vec<PendingReport>, _) =
                questions.into_iter().partition(PendingReport::is_open);
            questions = open;
            if let Some(cause) = Vec::into_iter(done).find_map(|question| read_report(question, operation)) {
                return Some(cause);
            }
            if let Err(died @ comm::Error::PeerDied { .. }) = self.first_cause() {
                return Some(died.into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        None
    }

    /// Sends nothing, but fails with the world group's first failure if there is one.
    fn first_cause(&self) -> comm::Result<()> {
        self.world.run(Operation::Batch { messages: Vec::new() })
    }
}

/// A pending receive for a neighbour's report. Dropping it cancels the receive, by aborting the group.
struct PendingReport {
    receiving: Arc<dyn Communicator>,
    text: Tensor,
    work: Option<Work>,
}

impl PendingReport {
    fn is_open(&self) -> bool {
        self.work.as_ref().is_some_and(|work| !work.is_done())
    }
}

impl Drop for PendingReport {
    fn drop(&mut self) {
        if self.is_open() {
            self.receiving.abort();
        }
    }
}

/// Creates the groups of those pairs that this rank is in; all ranks pass the pairs in the same order.
fn create_pair_groups(
    world: &dyn Communicator,
    pairs: impl IntoIterator<Item = (usize, usize)>,
    neighbours: &mut BTreeMap<usize, Neighbour>,
) -> Result<()> {
    for (a, b) in pairs {
        if [a, b].contains(&world.rank()) {
            let other = if a == world.rank() { b } else { a };
            let (upwards, downwards) = (world.subgroup(&[a, b])?, world.subgroup(&[a, b])?);
            let (sending, receiving) =
                if world.rank() < other { (upwards, downwards) } else { (downwards, upwards) };
            neighbours.insert(world.world_ranks()[other], Neighbour { sending, receiving });
        }
    }
    Ok(())
}

fn post_receive(receiving: &Arc<dyn Communicator>) -> Result<PendingReport> {
    let during = Error::during("a failure report of another rank");
    let text = Tensor::zeros(REPORT_BYTES, DType::U8, &Device::Cpu).map_err(during)?;
    let work = receiving.recv(&text, 1 - receiving.rank())?;
    Ok(PendingReport { receiving: receiving.clone(), text, work: Some(work) })
}

/// Returns the cause that a rank has reported, or that its process died.
fn read_report(mut question: PendingReport, operation: &str) -> Option<Error> {
    match question.work.take()?.wait() {
        Ok(()) => {}
        Err(died @ comm::Error::PeerDied { .. }) => return Some(died.into()),
        Err(_) => return None,
    }
    let bytes = question.text.to_vec1::<u8>().ok()?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(REPORT_BYTES);
    Some(match serde_json::from_slice(&bytes[..end]).ok()? {
        Cause::Died { rank, host } => {
            comm::Error::PeerDied { rank, host, operation: operation.to_string() }.into()
        }
        Cause::Failed { rank, reason } => Error::PeerFailed { rank, reason },
    })
}

/// Encodes a cause as JSON, padded with zeros. A reason that is too long is truncated.
fn encode(cause: &Cause) -> candle_core::Result<Tensor> {
    let encode = |cause: &Cause| serde_json::to_vec(cause).map_err(candle_core::Error::wrap);
    let mut bytes = encode(cause)?;
    if let (true, Cause::Failed { rank, reason }) = (bytes.len() > REPORT_BYTES, cause) {
        // A character takes at most twelve bytes in JSON.
        let reason = reason.chars().take(REPORT_BYTES / 16).chain("...".chars()).collect();
        bytes = encode(&Cause::Failed { rank: *rank, reason })?;
    }
    bytes.resize(REPORT_BYTES, 0);
    Tensor::from_vec(bytes, REPORT_BYTES, &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    use crate::ScheduleKind;

    #[test]
    fn whoever_asks_hears_the_cause_however_long_it_is() {
        let table = Table::of(ScheduleKind::GPipe, 3, 1, 1).unwrap();
        let lines = Local::run_shared(3, |comm| {
            let failures = FailureReports::new(comm.clone(), &table, &BTreeSet::new(), None)?;
            if comm.rank() == 1 {
                let reason = "\u{1}\u{1F600}".repeat(3000);
                failures.report(&Error::BadTable { reason });
                return Ok(None);
            }
            let operation = "recv #1".into();
            let error = comm::Error::PeerLeft { rank: 1, host: "a".into(), operation };
            Ok(Some(failures.cause(error).to_string()))
        });
        let lines = lines.unwrap();
        let line = lines[0].clone().unwrap();
        assert!(line.starts_with("rank 1 could not go on: the table of actions is no schedule: "), "{line}");
        assert!(line.ends_with("...") && lines[2].as_ref() == Some(&line), "{line}");
    }
}
