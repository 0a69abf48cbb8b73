//! Threads that load batches ahead, and hand them over in order.
//!
//! One queue under one lock: a worker takes the next batch's indices from it, loads without the lock, and puts the
//! result into the batch's own place. The consumer takes from the front only. So batches come in sampler order, a
//! slow batch holds up nobody but the consumer, and no more than a window of them is ever under way.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use crate::fetch::{Fetch, Loaded};
use crate::{BatchIndices, Dataset, SamplerError};

/// The worker threads of one epoch. Dropping it ends and joins them.
pub(crate) struct Workers<D: Dataset, B> {
    shared: Arc<Shared<D, B>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<D: Dataset, B> {
    fetch: Fetch<D, B>,
    queue: Mutex<Queue<B>>,
    /// The batch that the consumer wants is there, or there will be none.
    ready: Condvar,
    /// There is room in the window, or no more work.
    room: Condvar,
    /// How many batches may be under way or waiting.
    window: usize,
    stop: AtomicBool,
}

struct Queue<B> {
    indices: BatchIndices,
    /// The batch at the front of `places`.
    wanted: usize,
    /// One place for each batch that was handed out and not yet taken, in order; empty while it is being loaded.
    places: VecDeque<Option<Loaded<B>>>,
    /// Whether there are no more indices to hand out.
    over: bool,
}

impl<D: Dataset + 'static, B: Send + 'static> Workers<D, B> {
    pub(crate) fn start(
        fetch: Fetch<D, B>,
        indices: BatchIndices,
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
                // Those that run already are joined as `workers` goes.
                Err(cause) => return Err(SamplerError::SpawnWorker { worker, num_workers, cause }),
            }
        }
        Ok(workers)
    }
}

impl<D: Dataset, B> Workers<D, B> {
    /// The next batch, waiting for it where need be.
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

    /// What a worker does: batch after batch, until there are none left or nobody wants them.
    fn work(&self) {
        let mut indices = Vec::new();
        while let Some(batch) = self.take(&mut indices) {
            let Some(loaded) = self.fetch.fetch(batch, &indices, || self.stopped()) else { return };
            self.put(batch, Loaded { batch: loaded, samples: indices.len() });
        }
    }

    /// Waits for room, then takes the next batch's indices and gives its number.
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

    /// Puts a loaded batch into its place.
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
            // Under the lock, so that no worker can be between looking and waiting.
            let _queue = self.shared.lock();
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of what it calls, and has none of its own to report.
            let _ = thread.join();
        }
    }
}
