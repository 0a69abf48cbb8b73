//! Executes the script of a rank.

use std::io::stdin;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, Error, Operation, ReduceOp, Result, Tcp, Work};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};
use serde_json::json;

use crate::dice::Dice;
use crate::script::{Action, operations};
use crate::worker::{now, verdict};

pub(crate) struct Player {
    comm: Option<Tcp>,
    /// The group for calls; `None` for the group of all ranks.
    group: Option<Arc<dyn Communicator>>,
    /// All groups that this rank is in, in order of creation.
    groups: Vec<Arc<dyn Communicator>>,
    works: Vec<Work>,
    /// Files that only take numbers.
    held: Vec<OwnedFd>,
}

impl Player {
    pub(crate) fn new(comm: Tcp) -> Self {
        Self { comm: Some(comm), group: None, groups: Vec::new(), works: Vec::new(), held: Vec::new() }
    }

    pub(crate) fn play(mut self, actions: &[Action]) -> i32 {
        let outcome = actions.iter().try_for_each(|action| self.act(action));
        let code = verdict(&outcome, &mut || self.call_again());
        self.close();
        code
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Call(words) => return self.call(words),
            Action::Survive(words) => drop(self.call(words).unwrap_err()),
            Action::Submit(words) => {
                for operation in self.operations(words) {
                    self.works.push(self.current().submit(operation)?);
                }
            }
            Action::Detach => {
                let works: Vec<Work> = self.works.drain(..).collect();
                std::thread::spawn(move || works.into_iter().try_for_each(Work::wait).unwrap());
            }
            Action::WaitAll => return self.works.drain(..).try_for_each(Work::wait),
            Action::Group(_) | Action::Meet(_) | Action::Within(_) => return self.choose(action),
            Action::Around(words) => {
                println!("@ready");
                loop {
                    for group in self.groups.clone() {
                        self.group = Some(group);
                        self.call(words)?;
                    }
                }
            }
            Action::Repeat(words) => return self.forever(&mut || words.clone()),
            Action::Random(seed) => {
                let (mut dice, world_size) = (Dice(*seed), self.current().world_size());
                return self.forever(&mut || dice.call(world_size));
            }
            Action::Some(seed, count) => {
                let (mut dice, world_size) = (Dice(*seed), self.current().world_size());
                return (0..*count).try_for_each(|_| self.call(&dice.call(world_size)));
            }
            Action::Polite(seed) => return self.until_told(*seed),
            Action::Pid => println!("\n@pid {}", std::process::id()),
            Action::Ready => println!("@ready"),
            Action::Await => drop(stdin().read_line(&mut String::new()).unwrap()),
            Action::Sleep(milliseconds) => std::thread::sleep(Duration::from_millis(*milliseconds)),
            Action::World => self.group = None,
            Action::Announce(reason) => self.current().announce_failure(reason),
            Action::Close => self.close(),
            Action::Abort => self.current().abort(),
            Action::Panic => panic!("as the script says"),
            Action::Exit(code) => exit(*code),
            Action::Die(rank) if *rank == self.comm.as_ref().unwrap().rank() => {
                println!("@dying {}", now());
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            Action::Die(_) => {}
            Action::Limit => self.limit(),
            Action::Cycles(_) => panic!("cycles must be alone"),
        }
        Ok(())
    }

    /// Sees to it that this process cannot open any more files.
    fn limit(&mut self) {
        // No number below that of the last open file is free, so that closing files makes room.
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let numbers = open.map(|file| file.file_name().to_string_lossy().parse::<i32>().unwrap());
        let last = numbers.max().unwrap();
        while self.held.last().is_none_or(|held| held.as_raw_fd() < last) {
            self.held.push(rustix::io::fcntl_dupfd_cloexec(stdin(), 0).unwrap());
        }
        let current = Some(self.held[self.held.len() - 1].as_raw_fd() as u64 + 1);
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    }

    /// Creates a group of some ranks, or selects an existing one.
    fn choose(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Group(ranks) => {
                self.group = self.comm.as_ref().unwrap().new_group(ranks)?;
                self.groups.extend(self.group.clone());
            }
            Action::Meet(ranks) => {
                if let Err(error) = self.comm.as_ref().unwrap().subgroup(ranks) {
                    // The group of all ranks has not failed, so no further calls are made in it: they would disturb the
                    // others.
                    let code = verdict(&Err(error.clone()), &mut || Err(error.clone()));
                    self.close();
                    exit(code);
                }
            }
            Action::Within(ranks) => {
                let found = self.groups.iter().find(|group| group.world_ranks() == ranks);
                self.group = Some(found.unwrap().clone());
            }
            _ => {}
        }
        Ok(())
    }

    fn current(&self) -> &dyn Communicator {
        match &self.group {
            Some(group) => &**group,
            None => self.comm.as_ref().unwrap(),
        }
    }

    fn operations(&self, words: &[String]) -> Vec<Operation> {
        operations(words, self.current().rank(), self.current().world_size())
    }

    fn call(&self, words: &[String]) -> Result<()> {
        self.operations(words).into_iter().try_for_each(|operation| self.current().run(operation))
    }

    fn forever(&self, next: &mut dyn FnMut() -> Vec<String>) -> Result<()> {
        (0..3).try_for_each(|_| self.call(&next()))?;
        println!("@ready");
        loop {
            self.call(&next())?;
        }
    }

    fn until_told(&self, seed: u64) -> Result<()> {
        let (mut dice, world_size) = (Dice(seed), self.current().world_size());
        let told = Arc::new(AtomicBool::new(false));
        let listener = told.clone();
        std::thread::spawn(move || {
            stdin().read_line(&mut String::new()).unwrap();
            listener.store(true, Ordering::SeqCst);
        });
        println!("@ready");
        loop {
            self.call(&dice.call(world_size))?;
            let all_told = Tensor::new(&[u8::from(told.load(Ordering::SeqCst))], &Device::Cpu).unwrap();
            self.current().run(Operation::AllReduce { tensor: all_told.clone(), op: ReduceOp::Min })?;
            if all_told.to_vec1::<u8>().unwrap() == [1] {
                return Ok(());
            }
        }
    }

    /// Makes calls after a failure; all of them must fail.
    fn call_again(&mut self) -> Result<()> {
        let outcomes: Vec<Result<()>> = self.works.drain(..).map(Work::wait).collect();
        let words: Vec<String> = "all_reduce f32 10 sum".split(' ').map(String::from).collect();
        let all_reduce = || self.operations(&words).remove(0);
        let Some(comm) = &self.comm else { return outcomes.into_iter().collect() };
        let comm: &dyn Communicator = self.group.as_deref().unwrap_or(comm);
        let outcomes = outcomes.into_iter().chain([
            comm.run(Operation::Barrier),
            comm.submit(all_reduce()).and_then(Work::wait),
            comm.run(all_reduce()),
        ]);
        let errors: Vec<Error> = outcomes.filter_map(Result::err).collect();
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        println!("@note {}", json!({"later": texts.len()}));
        match errors.iter().find(|error| error.to_string() != texts[0]) {
            Some(other) => Err(other.clone()),
            None => Err(errors[0].clone()),
        }
    }

    fn close(&mut self) {
        if let Some(comm) = self.comm.take() {
            let began = Instant::now();
            drop(self.group.take());
            self.groups.clear();
            drop(comm);
            println!("@closed {}", began.elapsed().as_millis());
            println!("@threads {}", threads_left());
        }
    }
}

/// Returns the number of threads of the crate that still run. A thread that was joined may be visible for another
/// moment.
fn threads_left() -> usize {
    let began = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let left = names.filter(|name| name.starts_with("comm") || name.starts_with("girandole")).count();
        if left == 0 || began.elapsed() > Duration::from_secs(2) {
            return left;
        }
        std::thread::yield_now();
    }
}
