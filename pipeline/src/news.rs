//! Why a rank stopped: told to those that wait for it, so that all end with the same cause.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, Work};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, Table};

/// Bytes of a message: little enough that every transport takes it without waiting for the receiver.
const LEN: usize = 2048;
/// How long to wait until the world knows who was the first to fail.
const NEWS: Duration = Duration::from_millis(600);
/// How long to wait until a neighbour tells why it, or a rank beyond it, left.
const LONGEST: Duration = Duration::from_secs(5);

const PAUSE: Duration = Duration::from_millis(2);

/// Two groups of two with each neighbour, with each rank that has variables tied to some here, and with each that has copies of the
/// same stages, in which nobody says anything until something has failed. Of two: what is said in one ends with it, whoever else leaves.
pub(crate) struct News {
    world: Arc<dyn Communicator>,
    /// By the neighbour's number in the whole job.
    neighbours: BTreeMap<usize, Neighbour>,
    told: Mutex<Vec<Work>>,
}

/// One group for each direction: a group runs its operations in order, so that a receive which is never answered would hold up
/// what this rank has to say.
struct Neighbour {
    says: Arc<dyn Communicator>,
    hears: Arc<dyn Communicator>,
}

/// What a rank that stopped says of the cause.
#[derive(Debug, Serialize, Deserialize)]
enum Cause {
    /// A rank died.
    Died { rank: usize, host: String },
    /// A rank could not go on.
    Failed { rank: usize, reason: String },
}

impl News {
    /// Every rank must call it. `tied` are ranks that wait for each other, too, the lower one first; so are all of `copies`.
    pub(crate) fn new(
        world: Arc<dyn Communicator>,
        table: &Table,
        tied: &BTreeSet<(usize, usize)>,
        copies: Option<&dyn Communicator>,
    ) -> Result<Self> {
        let pairs = table.owners.windows(2).map(|pair| (pair[0].min(pair[1]), pair[0].max(pair[1])));
        let pairs = pairs.chain(tied.iter().copied());
        // The same order everywhere, so that no two ranks wait for each other.
        let pairs: BTreeSet<(usize, usize)> = pairs.filter(|(a, b)| a != b).collect();
        let mut neighbours = BTreeMap::new();
        meet(&*world, pairs, &mut neighbours)?;
        if let Some(copies) = copies {
            let all = 0..copies.world_size();
            meet(copies, all.clone().flat_map(|a| (a + 1..all.end).map(move |b| (a, b))), &mut neighbours)?;
        }
        Ok(Self { world, neighbours, told: Mutex::default() })
    }

    /// Tells those that wait for this rank why it stops, without waiting for them. They tell theirs.
    pub(crate) fn tell(&self, error: &Error) {
        let cause = match error {
            Error::Comm(comm::Error::PeerDied { rank, host, .. }) => {
                Cause::Died { rank: *rank, host: host.clone() }
            }
            Error::PeerFailed { rank, reason } => Cause::Failed { rank: *rank, reason: reason.clone() },
            // Whoever asks finds out by itself.
            error if error.is_peer_failure() => return,
            error => {
                let rank = self.world.world_ranks()[self.world.rank()];
                Cause::Failed { rank, reason: error.to_string() }
            }
        };
        let Ok(text) = written(&cause) else { return };
        // One that is gone as well needs no news.
        let works = self
            .neighbours
            .values()
            .filter_map(|Neighbour { says, .. }| says.send(&text, 1 - says.rank()).ok());
        self.told.lock().unwrap_or_else(PoisonError::into_inner).extend(works);
    }

    /// A rank that left did so for a reason that it, or the world, knows.
    pub(crate) fn cause(&self, error: comm::Error) -> Error {
        let comm::Error::PeerLeft { rank: left, operation, .. } = &error else { return error.into() };
        let told = match self.neighbours.get(left) {
            Some(neighbour) => self.listen([neighbour], operation),
            None => self.listen(self.neighbours.values(), operation),
        };
        if let Some(cause) = told {
            return cause;
        }
        let began = Instant::now();
        while began.elapsed() < NEWS {
            if let Err(first) = self.first_cause() {
                return first.into();
            }
            std::thread::sleep(PAUSE);
        }
        error.into()
    }

    /// What the first of these tells that knows a cause.
    fn listen<'a>(
        &self,
        neighbours: impl IntoIterator<Item = &'a Neighbour>,
        operation: &str,
    ) -> Option<Error> {
        let mut questions: Vec<Question> =
            neighbours.into_iter().filter_map(|Neighbour { hears, .. }| ask(hears).ok()).collect();
        let began = Instant::now();
        while !questions.is_empty() && began.elapsed() < LONGEST {
            let (open, done): (Vec<Question>, _) = questions.into_iter().partition(Question::is_open);
            questions = open;
            if let Some(cause) = Vec::into_iter(done).find_map(|question| heard(question, operation)) {
                return Some(cause);
            }
            if let Err(died @ comm::Error::PeerDied { .. }) = self.first_cause() {
                return Some(died.into());
            }
            std::thread::sleep(PAUSE);
        }
        None
    }

    /// Sends nothing, but fails with the world's first cause where there is one.
    fn first_cause(&self) -> comm::Result<()> {
        self.world.run(Operation::Batch { messages: Vec::new() })
    }
}

/// A neighbour may tell why it, or a rank beyond it, left. Nothing is waited for any longer once this is dropped.
struct Question {
    hears: Arc<dyn Communicator>,
    text: Tensor,
    work: Option<Work>,
}

impl Question {
    fn is_open(&self) -> bool {
        self.work.as_ref().is_some_and(|work| !work.is_done())
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if self.is_open() {
            self.hears.abort();
        }
    }
}

/// Makes the groups of each of these pairs in which this rank is; they come in order.
fn meet(
    world: &dyn Communicator,
    pairs: impl IntoIterator<Item = (usize, usize)>,
    neighbours: &mut BTreeMap<usize, Neighbour>,
) -> Result<()> {
    for (a, b) in pairs {
        if [a, b].contains(&world.rank()) {
            let other = if a == world.rank() { b } else { a };
            let (upwards, downwards) = (world.subgroup(&[a, b])?, world.subgroup(&[a, b])?);
            let (says, hears) =
                if world.rank() < other { (upwards, downwards) } else { (downwards, upwards) };
            neighbours.insert(world.world_ranks()[other], Neighbour { says, hears });
        }
    }
    Ok(())
}

fn ask(hears: &Arc<dyn Communicator>) -> Result<Question> {
    let during = Error::during("news of another rank");
    let text = Tensor::zeros(LEN, DType::U8, &Device::Cpu).map_err(during)?;
    let work = hears.recv(&text, 1 - hears.rank())?;
    Ok(Question { hears: hears.clone(), text, work: Some(work) })
}

/// What a rank has told, or that its process ended.
fn heard(mut question: Question, operation: &str) -> Option<Error> {
    match question.work.take()?.wait() {
        Ok(()) => {}
        Err(died @ comm::Error::PeerDied { .. }) => return Some(died.into()),
        Err(_) => return None,
    }
    let bytes = question.text.to_vec1::<u8>().ok()?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(LEN);
    Some(match serde_json::from_slice(&bytes[..end]).ok()? {
        Cause::Died { rank, host } => {
            comm::Error::PeerDied { rank, host, operation: operation.to_string() }.into()
        }
        Cause::Failed { rank, reason } => Error::PeerFailed { rank, reason },
    })
}

/// As JSON, with zeros after it. A reason that is too long is cut.
fn written(cause: &Cause) -> candle_core::Result<Tensor> {
    let encode = |cause: &Cause| serde_json::to_vec(cause).map_err(candle_core::Error::wrap);
    let mut bytes = encode(cause)?;
    if let (true, Cause::Failed { rank, reason }) = (bytes.len() > LEN, cause) {
        // A character takes at most twelve bytes in JSON.
        let reason = reason.chars().take(LEN / 16).chain("...".chars()).collect();
        bytes = encode(&Cause::Failed { rank: *rank, reason })?;
    }
    bytes.resize(LEN, 0);
    Tensor::from_vec(bytes, LEN, &Device::Cpu)
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
            let news = News::new(comm.clone(), &table, &BTreeSet::new(), None)?;
            if comm.rank() == 1 {
                let reason = "\u{1}\u{1F600}".repeat(3000);
                news.tell(&Error::BadTable { reason });
                return Ok(None);
            }
            let operation = "recv #1".into();
            let error = comm::Error::PeerLeft { rank: 1, host: "a".into(), operation };
            Ok(Some(news.cause(error).to_string()))
        });
        let lines = lines.unwrap();
        let line = lines[0].clone().unwrap();
        assert!(line.starts_with("rank 1 could not go on: the table of actions is no schedule: "), "{line}");
        assert!(line.ends_with("...") && lines[2].as_ref() == Some(&line), "{line}");
    }
}
