//! Groups that train on their own, averaged by the formula.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, Var};
use girandole::comm::{Communicator, Local, carry};
use girandole::models::CausalLm;
use girandole::trainer::{TrainConfig, Trainer};
use girandole::{FarConfig, Layout, Parallel};

use crate::common::Setup;
use crate::far::{ALL, Reports, Uneven};

/// Groups that are each trained in this process, and averaged by the formula.
pub(crate) struct ByHand {
    pub(crate) config: TrainConfig,
    pub(crate) groups: usize,
    /// Groups that are left out after a step, until after another one.
    pub(crate) away: Vec<(usize, Range<usize>)>,
}

impl ByHand {
    fn is_there(&self, group: usize, step: usize) -> bool {
        !self.away.iter().any(|(away, steps)| *away == group && steps.start < step && step <= steps.end)
    }

    /// Returns the losses of each group, and at the end that of the model on all rows.
    pub(crate) fn train(&self) -> (Vec<Vec<f64>>, f64) {
        Local::run_shared(1, |comm| Ok(self.train_on(comm)?)).unwrap().remove(0)
    }

    fn train_on(&self, comm: Arc<dyn Communicator>) -> Result<(Vec<Vec<f64>>, f64)> {
        let (far, groups) = (self.config.far, self.groups);
        let own = FarConfig::default();
        let batch_size = self.config.batch_size / groups;
        let config = TrainConfig { batch_size, far: own, fewest_ranks: None, ..self.config.clone() };
        let model = |_| Ok(Setup::default().parallel(comm.clone(), &Layout::default(), None)?);
        let mut models = (0..groups).map(model).collect::<Result<Vec<Parallel<CausalLm>>>>()?;
        let named = models[0].named_vars();
        let fragments: Vec<usize> = named.iter().map(|(name, _)| fragment(name, far.fragments)).collect();
        let vars: Vec<Vec<Var>> =
            models.iter().map(|model| model.named_vars().into_iter().map(|(_, var)| var).collect()).collect();
        let mut start = copied(&vars[0])?;
        let mut momentum: Vec<Tensor> = start.iter().map(Tensor::zeros_like).collect::<Result<_>>()?;
        let mut trainers = Vec::new();
        for (first, model) in models.iter_mut().enumerate() {
            let data = Arc::new(Uneven { first, stride: groups });
            trainers.push(Trainer::new(model, data, config.clone()).map_err(carry)?);
        }
        let mut losses = vec![Vec::new(); groups];
        let mut targets = vec![vec![0.0; groups]; far.fragments];
        // What groups have sent: their parameters then, and the targets these were learned from.
        let mut sent: Vec<Vec<Tensor>> = vec![Vec::new(); start.len()];
        let mut sent_targets = targets.clone();
        for step in 1..=config.steps {
            let averaged = (step.next_multiple_of(far.every) + far.delay).min(config.steps);
            for (group, trainer) in trainers.iter_mut().enumerate() {
                let mut reports = Reports::default();
                trainer.run_until(step, &mut reports).map_err(carry)?;
                if self.is_there(group, step) && self.is_there(group, averaged) {
                    targets.iter_mut().for_each(|of| of[group] += reports.0[0].targets as f64);
                    losses[group].push(reports.0[0].loss);
                }
            }
            let is_last = step == config.steps;
            let is_sent = |fragment: usize, step: usize| is_last || is_due(&far, fragment, step);
            for fragment in (0..far.fragments).filter(|fragment| is_sent(*fragment, step)) {
                for group in 0..groups {
                    sent_targets[fragment][group] += std::mem::take(&mut targets[fragment][group]);
                }
                for place in (0..start.len()).filter(|place| fragments[*place] == fragment) {
                    sent[place] = copied(&vars.iter().map(|vars| vars[place].clone()).collect::<Vec<_>>())?;
                }
            }
            let is_applied = |fragment: usize| is_sent(fragment, step.saturating_sub(far.delay));
            for place in (0..start.len()).filter(|place| is_applied(fragments[*place])) {
                let targets = &sent_targets[fragments[place]];
                let there = (0..groups).filter(|group| self.is_there(*group, step));
                let changes = there.map(|group| (&sent[place][group], targets[group])).collect();
                outer_step(&far, &mut start[place], &mut momentum[place], changes, targets.iter().sum())?;
                for (group, vars) in vars.iter().enumerate() {
                    // A group that joins now has learned nothing since.
                    let since = match self.is_there(group, step) {
                        true => (vars[place].as_detached_tensor() - &sent[place][group])?,
                        false => start[place].zeros_like()?,
                    };
                    vars[place].set(&(&start[place] + since)?)?;
                }
            }
            (0..far.fragments).filter(|of| is_applied(*of)).for_each(|of| sent_targets[of].fill(0.0));
        }
        let loss = trainers[0].evaluate_on(&ALL).map_err(carry)?;
        Ok((losses, loss))
    }
}

fn copied(vars: &[Var]) -> Result<Vec<Tensor>> {
    vars.iter().map(|var| var.as_detached_tensor().copy()).collect()
}

/// Whether groups send a fragment after a step that is not the last.
fn is_due(far: &FarConfig, fragment: usize, step: usize) -> bool {
    let offset = fragment * far.every / far.fragments;
    step > 0 && step >= offset && (step - offset).is_multiple_of(far.every)
}

/// The outer step by what groups have sent, with their targets, of so many in all.
fn outer_step(
    far: &FarConfig,
    start: &mut Tensor,
    momentum: &mut Tensor,
    sent: Vec<(&Tensor, f64)>,
    targets: f64,
) -> Result<()> {
    let mut mean = start.zeros_like()?;
    for (sent, own) in sent {
        mean = (mean + ((&*start - sent)? * (own / targets))?)?.detach();
    }
    *momentum = ((&*momentum * far.momentum)? + &mean)?;
    let outer = (mean + (&*momentum * far.momentum)?)?;
    *start = (&*start - (outer * far.learning_rate)?)?.detach();
    Ok(())
}

/// The fragment of a parameter: by its layer, or by the FNV hash of its name.
fn fragment(name: &str, fragments: usize) -> usize {
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(16_777_619);
    let layer = name.split('.').find_map(|part| part.parse().ok());
    layer.unwrap_or_else(|| name.bytes().fold(2_166_136_261, hash) as usize) % fragments
}
