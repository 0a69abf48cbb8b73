//! How groups of a mesh with `far` average: `--far-every` and what belongs to it.

use clap::{Args, ValueEnum};
use girandole::{FarConfig, FarPrecision, Layout};

use super::TrainOptions;
use super::optimizer::momentum;
use crate::error::{Error, Result};
use crate::options::{count, learning_rate};

/// Bits of each number that is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BitsOption {
    /// All of them.
    #[value(name = "32")]
    All,
    /// 16 (f16).
    #[value(name = "16")]
    Sixteen,
    /// 8, with a scale for each 128 numbers.
    #[value(name = "8")]
    Eight,
    /// 4, with a scale for each 128 numbers.
    #[value(name = "4")]
    Four,
}

/// Options of groups that train on their own.
#[derive(Debug, Clone, Args)]
pub(super) struct FarOptions {
    /// Steps after which groups of a --mesh with far average [default: 100]
    ///
    /// In between, each group trains on its own rows of a batch. The mean of their changes, over all targets, is the gradient of an outer step by SGD
    /// with Nesterov momentum (DiLoCo). They also average after the last step.
    #[arg(long, value_name = "STEPS", value_parser = count, help_heading = "Optimizer")]
    far_every: Option<usize>,
    /// Learning rate of that outer step [default: 0.7]
    #[arg(long, value_name = "LR", value_parser = learning_rate, help_heading = "Optimizer")]
    far_lr: Option<f64>,
    /// Momentum of that outer step [default: 0.9]
    #[arg(long, value_name = "M", value_parser = momentum, help_heading = "Optimizer")]
    far_momentum: Option<f64>,
    /// Bits of each number that groups send [default: 32]
    ///
    /// With 8 or 4, 128 numbers have a scale together. In fewer than 32, what is not sent of a change is added to the next.
    #[arg(long, value_name = "BITS", value_enum, help_heading = "Optimizer")]
    far_bits: Option<BitsOption>,
    /// Parts of the parameters that are averaged at steps of their own [default: 1]
    ///
    /// Evenly within --far-every: so many times fewer bytes are sent at once, as many in all. Layer n is in part n modulo F.
    #[arg(long, value_name = "F", value_parser = count, help_heading = "Optimizer")]
    far_fragments: Option<usize>,
    /// Steps that groups go on with while what they send is on its way [default: 0]
    ///
    /// Fewer than from one fragment's average to the next one's. What a group has learned meanwhile stays on top of the average.
    #[arg(long, value_name = "STEPS", help_heading = "Optimizer")]
    far_delay: Option<usize>,
}

impl FarOptions {
    /// Returns how groups average.
    pub(super) fn config(&self) -> FarConfig {
        let default = FarConfig::default();
        FarConfig {
            every: self.far_every.unwrap_or(default.every),
            learning_rate: self.far_lr.unwrap_or(default.learning_rate),
            momentum: self.far_momentum.unwrap_or(default.momentum),
            precision: match self.far_bits {
                None | Some(BitsOption::All) => FarPrecision::F32,
                Some(BitsOption::Sixteen) => FarPrecision::F16,
                Some(BitsOption::Eight) => FarPrecision::Int8,
                Some(BitsOption::Four) => FarPrecision::Int4,
            },
            fragments: self.far_fragments.unwrap_or(default.fragments),
            delay: self.far_delay.unwrap_or(default.delay),
        }
    }
}

impl TrainOptions {
    /// Checks options of groups that train on their own.
    ///
    /// # Errors
    /// Such options without such groups; a learning rate of 0; parameters in 16 bits.
    pub(in crate::language) fn check_far(&self, layout: &Layout) -> Result<()> {
        let refuse = |option, got: String, help: &str| Err(Error::Option { option, got, help: help.into() });
        let FarOptions { far_every, far_lr, far_momentum, far_bits, far_fragments, far_delay } = &self.far;
        if layout.far == 1 {
            let given = [
                ("--far-every", far_every.map(|steps| steps.to_string())),
                ("--far-lr", far_lr.map(|rate| rate.to_string())),
                ("--far-momentum", far_momentum.map(|momentum| momentum.to_string())),
                ("--far-fragments", far_fragments.map(|parts| parts.to_string())),
                ("--far-delay", far_delay.map(|steps| steps.to_string())),
                ("--far-bits", far_bits.map(|bits| crate::options::value_name(&bits))),
            ];
            return match given.into_iter().find_map(|(option, got)| Some((option, got?))) {
                None => Ok(()),
                Some((option, got)) => refuse(
                    option,
                    got,
                    "no groups train on their own: give a --mesh with far, such as far=2, or leave it out",
                ),
            };
        }
        let config = self.far.config();
        let FarConfig { every, fragments, delay, .. } = config;
        if fragments > every {
            let help = format!("give at most --far-every, {every}");
            return refuse("--far-fragments", fragments.to_string(), &help);
        }
        if delay > config.most_delay() {
            let help = format!(
                "give at most {}: less than --far-every divided by --far-fragments, so that one average has come before the next is sent",
                config.most_delay()
            );
            return refuse("--far-delay", delay.to_string(), &help);
        }
        if *far_lr == Some(0.0) {
            return refuse("--far-lr", "0".into(), "nothing would be learned: give a number above 0");
        }
        if self.dtype().size_in_bytes() < 4 {
            let help = "groups of far average parameters in f32: the small changes of an average would be lost in 16 bits";
            return refuse("--parameters", crate::options::value_name(&self.parameters), help);
        }
        Ok(())
    }
}
