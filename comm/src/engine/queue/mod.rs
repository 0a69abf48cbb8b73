//! Operation queue of a communicator: operations run one at a time and in order, on the communicator's own thread or on
//! a thread that waits for a result.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::base::buffer::staging::Before;
use crate::base::lock;
use crate::engine::runner::Run;
use crate::failure::peer_failures;
use crate::failure::shutdown::ShutdownFlag;
use crate::failure::supervisor::Supervisor;
use crate::{Error, Operation, Result, Stats};

/// Runs submitted operations. Dropping it finishes the queued ones, as far as the other ranks take part in them; the
/// rest is aborted.
pub(crate) struct OperationQueue {
    shared: Arc<QueueState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    rank: usize,
    world_size: usize,
}

/// The pending result of one operation.
pub(crate) struct PendingResult {
    shared: Arc<QueueState>,
    result: Mutex<Option<Result<()>>>,
}

struct QueueState {
    queue: Mutex<Queue>,
    /// Wakes threads that wait for a result.
    settled: Condvar,
    /// Wakes the communicator's own thread.
    submitted: Condvar,
    /// Locked while an operation runs.
    runner: Mutex<Box<dyn Run>>,
    /// The runner's statistics after the last operation.
    stats: Mutex<Stats>,
    supervisor: Arc<dyn Supervisor>,
    ending: Arc<ShutdownFlag>,
    failed: Mutex<Option<Error>>,
}

struct QueuedOperation {
    ticket: Arc<PendingResult>,
    operation: Operation,
    before: Before,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<QueuedOperation>,
    /// Whether some thread is running an operation.
    running: bool,
    waiters: usize,
    closing: bool,
}

impl OperationQueue {
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
    pub(crate) fn submit(&self, operation: Operation) -> Result<Arc<PendingResult>> {
        let ticket = self.enqueue(operation)?;
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let name = "comm".to_string();
            let started = std::thread::Builder::new().name(name).spawn(move || shared.serve());
            // Without that thread, the operation runs when somebody waits for it.
            *thread = started.inspect_err(|reason| tracing::warn!("cannot start a thread: {reason}")).ok();
        }
        drop(thread);
        self.shared.submitted.notify_one();
        Ok(ticket)
    }

    /// Runs an operation after those queued: on this thread, unless another one is already running operations.
    pub(crate) fn run(&self, operation: Operation) -> Result<()> {
        let mut queue = lock(&self.shared.queue);
        if queue.running || !queue.jobs.is_empty() {
            drop(queue);
            return self.enqueue(operation)?.wait();
        }
        // Nothing is before it, so it need not be queued, which takes longer than a small operation.
        operation.validate(self.rank, self.world_size)?;
        let before = Before::of(&operation)?;
        self.shared.check(&operation)?;
        self.shared.supervisor.on_program_call();
        queue.running = true;
        drop(queue);
        let result = self.shared.execute(&operation, &before);
        drop(self.shared.end_operation());
        result
    }

    /// Aborts the running operation and the queued ones; later ones return an error.
    pub(crate) fn abort(&self) {
        let aborted = Error::Aborted { operation: "the group".into() };
        lock(&self.shared.failed).get_or_insert(aborted);
        self.shared.ending.abort();
    }

    /// Finishes the queued operations. Returns whether the group has not failed.
    pub(crate) fn close(self) -> bool {
        let shared = self.shared.clone();
        drop(self);
        lock(&shared.failed).is_none() && shared.supervisor.failure().is_none()
    }

    pub(crate) fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    fn enqueue(&self, operation: Operation) -> Result<Arc<PendingResult>> {
        operation.validate(self.rank, self.world_size)?;
        // A queued operation must not keep an autograd graph alive: a graph of `autograd` contains this communicator,
        // which would then be closed by the thread that drops the operation, its own.
        let operation = operation.detached();
        let before = Before::of(&operation)?;
        let ticket = Arc::new(PendingResult { shared: self.shared.clone(), result: Mutex::default() });
        let mut queue = lock(&self.shared.queue);
        // If the group has failed and other operations are before this one, the first of them is to report the failure.
        if queue.running || !queue.jobs.is_empty() {
            self.shared.check_known()?;
        } else {
            self.shared.check(&operation)?;
        }
        self.shared.supervisor.on_program_call();
        queue.jobs.push_back(QueuedOperation { ticket: ticket.clone(), operation, before });
        Ok(ticket)
    }
}

impl Drop for OperationQueue {
    fn drop(&mut self) {
        self.shared.ending.close();
        lock(&self.shared.queue).closing = true;
        self.shared.submitted.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            // The thread itself never panics: operations are caught.
            let _ = thread.join();
        }
        // A thread that waits for a `Work` may be running an operation; and if no thread was started, operations may
        // still be queued.
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

impl PendingResult {
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
    /// Body of the communicator's own thread.
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            queue = match self.run_next(queue) {
                Ok(queue) => queue,
                Err(queue) if queue.closing && queue.jobs.is_empty() => return,
                // Another thread is running an operation, and signals `settled` when it is done.
                Err(queue) if queue.running => self.wait_for_others(queue),
                Err(queue) => self.submitted.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Sleeps until another thread has finished its operation.
    fn wait_for_others<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        queue.waiters += 1;
        let mut queue = self.settled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        queue.waiters -= 1;
        queue
    }

    /// Runs the next operation, if there is one and no other is running. Returns the queue as `Err` if nothing was run.
    fn run_next<'a>(
        &'a self,
        mut queue: MutexGuard<'a, Queue>,
    ) -> std::result::Result<MutexGuard<'a, Queue>, MutexGuard<'a, Queue>> {
        if queue.running {
            return Err(queue);
        }
        let Some(QueuedOperation { ticket, operation, before }) = queue.jobs.pop_front() else {
            return Err(queue);
        };
        queue.running = true;
        drop(queue);
        let result = self.check(&operation).and_then(|()| self.execute(&operation, &before));
        // Frees the tensors before anybody learns that the operation is done.
        drop(operation);
        *lock(&ticket.result) = Some(result);
        Ok(self.end_operation())
    }

    /// Lets the next operation run.
    fn end_operation(&self) -> MutexGuard<'_, Queue> {
        let mut queue = lock(&self.queue);
        queue.running = false;
        if queue.waiters > 0 {
            self.settled.notify_all();
        }
        queue
    }

    fn execute(&self, operation: &Operation, before: &Before) -> Result<()> {
        let run = || {
            let mut runner = lock(&self.runner);
            let result = runner.run(operation, before);
            *lock(&self.stats) = runner.stats();
            result
        };
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            Err(Error::system(operation.name(), "a bug in Girandole: the operation panicked"))
        });
        // Some ranks may have finished the operation, so the group can no longer be used, whatever the reason. If
        // another thread has recorded a failure already, all operations return that one.
        result.map_err(|error| match (self.fail(error.clone()), error) {
            (Error::Aborted { .. }, error @ Error::Aborted { .. }) => error,
            (first, _) => first,
        })
    }

    /// Records that the group has failed. Returns the first failure, which all operations return.
    fn fail(&self, error: Error) -> Error {
        // No other rank can know it, and this one may be ended before its program has told it.
        if matches!(error, Error::System { .. }) && self.supervisor.failure().is_none() {
            self.supervisor.announce(&error.to_string());
        }
        let first = lock(&self.failed).get_or_insert(error).clone();
        peer_failures::record(&first);
        first
    }

    /// Returns the error with which an earlier operation has ended the group, if any.
    fn check_known(&self) -> Result<()> {
        lock(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// Returns the first failure, if the group has failed. Called while no operation runs.
    fn check(&self, operation: &Operation) -> Result<()> {
        self.check_known()?;
        let Some(cause) = self.supervisor.failure() else { return Ok(()) };
        let call = lock(&self.runner).describe(operation);
        Err(self.fail(self.supervisor.error(&cause, call)))
    }
}

impl fmt::Debug for OperationQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

impl fmt::Debug for PendingResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_done() { "done" } else { "under way" })
    }
}

#[cfg(test)]
mod tests;
