//! The queue of a communicator: operations run one at a time and in order, on its own thread or on that of whoever waits.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::base::buffer::staging::Before;
use crate::base::lock::lock;
use crate::blame::causes;
use crate::blame::ending::Ending;
use crate::blame::supervisor::Supervisor;
use crate::engine::runner::Run;
use crate::{Error, Operation, Result, Stats};

/// Runs what is submitted. Dropping it finishes what is queued, as far as the other ranks do their part; the rest is aborted.
pub(crate) struct Engine {
    shared: Arc<QueueState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    world_size: usize,
}

/// The result of one operation, some day.
pub(crate) struct Ticket {
    shared: Arc<QueueState>,
    result: Mutex<Option<Result<()>>>,
}

struct QueueState {
    queue: Mutex<Queue>,
    /// For those who wait for a result.
    settled: Condvar,
    /// For the communicator's own thread.
    submitted: Condvar,
    /// Locked while an operation runs.
    runner: Mutex<Box<dyn Run>>,
    /// The runner's, as they were after the last operation.
    stats: Mutex<Stats>,
    supervisor: Arc<dyn Supervisor>,
    ending: Arc<Ending>,
    failed: Mutex<Option<Error>>,
}

struct Job {
    ticket: Arc<Ticket>,
    operation: Operation,
    before: Before,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Some thread runs an operation.
    running: bool,
    waiters: usize,
    closing: bool,
}

impl Engine {
    pub(crate) fn new(
        rank: usize,
        world_size: usize,
        runner: Box<dyn Run>,
        supervisor: Arc<dyn Supervisor>,
    ) -> Self {
        let shared = QueueState {
            queue: Mutex::default(),
            settled: Condvar::new(),
            submitted: Condvar::new(),
            stats: Mutex::new(runner.stats()),
            ending: runner.ending(),
            runner: Mutex::new(runner),
            supervisor,
            failed: Mutex::default(),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default(), rank, world_size }
    }

    /// Queues an operation for the communicator's own thread, which is started when first needed.
    pub(crate) fn submit(&self, operation: Operation) -> Result<Arc<Ticket>> {
        let ticket = self.enqueue(operation)?;
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let name = "comm".to_string();
            let started = std::thread::Builder::new().name(name).spawn(move || shared.serve());
            // Without a thread of its own, the operation runs when somebody waits for it.
            *thread = started.inspect_err(|reason| tracing::warn!("cannot start a thread: {reason}")).ok();
        }
        drop(thread);
        self.shared.submitted.notify_one();
        Ok(ticket)
    }

    /// Runs an operation after those queued, on this thread where no other is at it.
    pub(crate) fn run(&self, operation: Operation) -> Result<()> {
        self.enqueue(operation)?.wait()
    }

    /// Ends what is under way and what is queued with an error; nothing can be run any more.
    pub(crate) fn abort(&self) {
        let aborted = Error::Aborted { operation: "the group".into() };
        lock(&self.shared.failed).get_or_insert(aborted);
        self.shared.ending.abort();
    }

    /// Finishes what is queued; true where the group has not failed.
    pub(crate) fn close(self) -> bool {
        let shared = self.shared.clone();
        drop(self);
        lock(&shared.failed).is_none() && shared.supervisor.failure().is_none()
    }

    pub(crate) fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    fn enqueue(&self, operation: Operation) -> Result<Arc<Ticket>> {
        operation.validate(self.rank, self.world_size)?;
        // What is queued must not keep a graph: one of `autograd` has this very communicator in it, which would then be closed by
        // the thread that drops the operation, its own.
        let operation = operation.detached();
        let before = Before::of(&operation)?;
        let ticket = Arc::new(Ticket { shared: self.shared.clone(), result: Mutex::default() });
        let mut queue = lock(&self.shared.queue);
        // Where the group has failed and others are before this one, the first of them is to say so.
        if queue.running || !queue.jobs.is_empty() {
            self.shared.check_known()?;
        } else {
            self.shared.check(&operation)?;
        }
        self.shared.supervisor.goes_on();
        queue.jobs.push_back(Job { ticket: ticket.clone(), operation, before });
        Ok(ticket)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.ending.close();
        lock(&self.shared.queue).closing = true;
        self.shared.submitted.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            // The thread itself never panics: operations are caught.
            let _ = thread.join();
        }
        // Whoever waits for a `Work` may be at it, and without a thread nobody was.
        let mut queue = lock(&self.shared.queue);
        loop {
            queue = match self.shared.run_next(queue) {
                Ok(queue) => queue,
                Err(queue) if queue.running => self.shared.wait_for_others(queue),
                Err(_) => return,
            };
        }
    }
}

impl Ticket {
    pub(crate) fn wait(&self) -> Result<()> {
        let shared = &self.shared;
        let mut queue = lock(&shared.queue);
        loop {
            if let Some(result) = lock(&self.result).clone() {
                return result;
            }
            queue = match shared.run_next(queue) {
                Ok(queue) => queue,
                Err(queue) => shared.wait_for_others(queue),
            };
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        lock(&self.result).is_some()
    }
}

impl QueueState {
    /// The life of the communicator's own thread.
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            queue = match self.run_next(queue) {
                Ok(queue) => queue,
                Err(queue) if queue.closing && queue.jobs.is_empty() => return,
                // Another thread runs an operation: it is told of when that is done.
                Err(queue) if queue.running => self.wait_for_others(queue),
                Err(queue) => self.submitted.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Sleeps until the operation that another thread runs is done.
    fn wait_for_others<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        queue.waiters += 1;
        let mut queue = self.settled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        queue.waiters -= 1;
        queue
    }

    /// Runs the next operation, if there is one and no other is running; `Err` gives the queue back where nothing was done.
    fn run_next<'a>(
        &'a self,
        mut queue: MutexGuard<'a, Queue>,
    ) -> std::result::Result<MutexGuard<'a, Queue>, MutexGuard<'a, Queue>> {
        if queue.running {
            return Err(queue);
        }
        let Some(Job { ticket, operation, before }) = queue.jobs.pop_front() else { return Err(queue) };
        queue.running = true;
        drop(queue);
        let result = self.execute(&operation, &before);
        // Its tensors are free before anybody hears that it is done.
        drop(operation);
        *lock(&ticket.result) = Some(result);
        let mut queue = lock(&self.queue);
        queue.running = false;
        if queue.waiters > 0 {
            self.settled.notify_all();
        }
        Ok(queue)
    }

    fn execute(&self, operation: &Operation, before: &Before) -> Result<()> {
        self.check(operation)?;
        let run = || {
            let mut runner = lock(&self.runner);
            let result = runner.run(operation, before);
            *lock(&self.stats) = runner.stats();
            result
        };
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            Err(Error::system(operation.name(), "a bug in Girandole: the operation panicked"))
        });
        // Some ranks may have done their part: the group is of no use any more, whatever the reason. Another thread may
        // have found it failed already; then that is what all are told.
        result.map_err(|error| match (self.fail(error.clone()), error) {
            (Error::Aborted { .. }, error @ Error::Aborted { .. }) => error,
            (first, _) => first,
        })
    }

    /// The group has failed. Gives what all are told: the first cause.
    fn fail(&self, error: Error) -> Error {
        let first = lock(&self.failed).get_or_insert(error).clone();
        causes::remember(&first);
        first
    }

    /// What an operation has ended with for which the group had failed.
    fn check_known(&self) -> Result<()> {
        lock(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// The first cause, where the group has failed. Called while no operation runs.
    fn check(&self, operation: &Operation) -> Result<()> {
        self.check_known()?;
        let Some(cause) = self.supervisor.failure() else { return Ok(()) };
        let call = lock(&self.runner).describe(operation);
        Err(self.fail(self.supervisor.error(&cause, call)))
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_done() { "done" } else { "under way" })
    }
}

#[cfg(test)]
mod tests;
