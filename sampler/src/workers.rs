//! Worker threads that prefetch batches and return them in order.
//!
//! There is one queue under one lock: a worker takes the next batch's indices from it, loads without the lock, and
//! puts the result into the batch's own slot. The consumer takes from the front only. So batches arrive in sampler
//! order, a slow batch blocks only the consumer, and at most a window of batches is in progress.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use crate::batch::RowBatches;
use crate::fetch::{Fetch, Loaded};
use crate::{Dataset, SamplerError};

/// The worker threads of one epoch, or of a run. Dropping it stops and joins them.
pub(crate) struct Workers<D: Dataset, B> {
    shared: Arc<Shared<D, B>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<D: Dataset, B> {
    fetch: Fetch<D, B>,
    queue: Mutex<Queue<B>>,
    /// Signalled when the batch that the consumer waits for is loaded, or there are no more.
    ready: Condvar,
    /// Signalled when the window has room, or there is no more work.
    room: Condvar,
    /// Maximum number of batches being loaded or waiting.
    window: usize,
    stop: AtomicBool,
}

struct Queue<B> {
    indices: Box<dyn RowBatches>,
    /// Index of the batch at the front of `places`.
    wanted: usize,
    /// One slot for each batch that a worker has started and the consumer has not taken, in order; `None` while it is
    /// being loaded.
    places: VecDeque<Option<Loaded<B>>>,
    /// Whether all indices have been taken by workers.
    over: bool,
}

impl<D: Dataset + 'static, B: Send + 'static> Workers<D, B> {
    pub(crate) fn start(
        fetch: Fetch<D, B>,
        indices: Box<dyn RowBatches>,
        num_workers: usize,
        window: usize,
    ) -> Result<Self, SamplerError> {
        let queue = Mutex::new(Queue { indices, wanted: 0, places: VecDeque::new(), over: false });
        let (ready, room) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { fetch, queue, ready, room, window, stop: AtomicBool::new(false) });
        let mut workers = Self { shared, threads: Vec::new() };
        for worker in 0..num_workers {
            let shared = Arc::clone(&workers.shared);
            let thread = Builder::new().name(format!("loader-{worker}")).spawn(move || shared.work());
            match thread {
                Ok(thread) => workers.threads.push(thread),
                // Dropping `workers` joins those that run already.
                Err(cause) => return Err(SamplerError::SpawnWorker { worker, num_workers, cause }),
            }
        }
        Ok(workers)
    }
}

impl<D: Dataset, B> Workers<D, B> {
    /// Returns the next batch, after waiting for it if necessary; `None` at the end of the epoch.
    pub(crate) fn next(&mut self) -> Option<Loaded<B>> {
        let mut queue = self.shared.lock();
        loop {
            if let Some(loaded) = queue.places.front_mut().and_then(Option::take) {
                queue.places.pop_front();
                queue.wanted += 1;
                drop(queue);
                self.shared.room.notify_one();
                return Some(loaded);
            }
            if queue.over && queue.places.is_empty() {
                return None;
            }
            queue = self.shared.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<D: Dataset, B> Shared<D, B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A worker's main loop: loads batches until none are left or `stop` is set.
    fn work(&self) {
        let mut indices = Vec::new();
        while let Some(batch) = self.take(&mut indices) {
            let Some(loaded) = self.fetch.fetch(batch, &indices, || self.stopped()) else { return };
            self.put(batch, Loaded { batch: loaded, samples: indices.len() });
        }
    }

    /// Waits for room in the window, then takes the next batch's indices and returns the batch's index.
    fn take(&self, indices: &mut Vec<usize>) -> Option<usize> {
        let mut queue = self.lock();
        while !self.stopped() && !queue.over && queue.places.len() >= self.window {
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if self.stopped() || queue.over {
            return None;
        }
        let batch = queue.wanted + queue.places.len();
        let failed = match queue.indices.next_into(indices) {
            Ok(true) => {
                queue.places.push_back(None);
                return Some(batch);
            }
            Ok(false) => None,
            Err(error) => Some(Loaded { batch: Err(error), samples: 0 }),
        };
        queue.over = true;
        queue.places.extend(failed.map(Some));
        drop(queue);
        self.ready.notify_all();
        self.room.notify_all();
        None
    }

    /// Puts a loaded batch into its slot.
    fn put(&self, batch: usize, loaded: Loaded<B>) {
        let mut queue = self.lock();
        let ahead = batch - queue.wanted;
        if let Some(place) = queue.places.get_mut(ahead) {
            *place = Some(loaded);
        }
        drop(queue);
        if ahead == 0 {
            self.ready.notify_all();
        }
    }
}

impl<D: Dataset, B> Drop for Workers<D, B> {
    fn drop(&mut self) {
        {
            // Under the lock, so that no worker is between checking the flag and waiting.
            let _queue = self.shared.lock();
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // Workers catch panics of the code they call, so there is nothing to report.
            let _ = thread.join();
        }
    }
}
