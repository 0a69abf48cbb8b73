//! Which optimizer steps the parameters: `--optimizer`, and the hyperparameters that it has.

use clap::{Args, ValueEnum};
use girandole::trainer::OptimizerConfig;
use plan::Optimizer;
use training::{AdamConfig, AdjustRate, MuonConfig, SgdConfig};

use super::TrainOptions;
use crate::error::{Error, Result};
use crate::options::{learning_rate, value_name};

/// How parameters are stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OptimizerOption {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Matrices of hidden layers by orthogonal directions, the rest by AdamW.
    Muon,
    /// Stochastic gradient descent.
    Sgd,
}

/// How Muon's learning rate depends on a matrix's shape, by PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AdjustOption {
    /// Longer steps for matrices with more rows than columns.
    Original,
    /// Steps as long as AdamW's.
    #[value(name = "match_rms_adamw")]
    MatchRmsAdamW,
    /// As the first, also shorter for matrices with fewer rows.
    #[value(name = "spectral_unclamped")]
    SpectralUnclamped,
}

/// The optimizer's options. Those that it has not are refused.
#[derive(Debug, Clone, Args)]
pub(super) struct OptimizerOptions {
    /// Optimizer
    ///
    /// `adamw`: Adam with decoupled weight decay. `muon`: as torch.optim.Muon for matrices of hidden layers, and AdamW for everything else: embeddings,
    /// head, routers of experts, norms, biases. `sgd`: stochastic gradient descent, with --momentum. A run goes on with the optimizer of its checkpoint.
    #[arg(long, value_enum, default_value = "adamw", help_heading = "Optimizer")]
    optimizer: OptimizerOption,
    /// Betas of AdamW [default: 0.9,0.95]
    #[arg(long, value_name = "A,B", value_parser = betas, help_heading = "Optimizer")]
    betas: Option<(f64, f64)>,
    /// Epsilon of AdamW [default: 1e-8]
    #[arg(long, value_name = "E", value_parser = learning_rate, help_heading = "Optimizer")]
    eps: Option<f64>,
    /// Weight decay, for matrices only [default: 0.1; of sgd 0]
    #[arg(long, value_name = "W", value_parser = learning_rate, help_heading = "Optimizer")]
    weight_decay: Option<f64>,
    /// Momentum of muon or sgd [default: 0.95; of sgd 0]
    #[arg(long, value_name = "M", value_parser = momentum, help_heading = "Optimizer")]
    momentum: Option<f64>,
    /// Nesterov's momentum, of muon or sgd [default: true; of sgd false]
    #[arg(long, value_name = "WHETHER", help_heading = "Optimizer")]
    nesterov: Option<bool>,
    /// How muon's learning rate depends on a matrix's shape [default: match_rms_adamw]
    ///
    /// `original` multiplies it by sqrt(max(1, rows / columns)), for a learning rate of about 0.02. `match_rms_adamw` by 0.2 sqrt(max(rows, columns)): steps
    /// are as long as AdamW's, so that one --lr fits all parameters. `spectral_unclamped` by sqrt(rows / columns), also below 1. PyTorch's default is
    /// `original`.
    #[arg(long, value_name = "HOW", value_enum, help_heading = "Optimizer")]
    adjust_lr: Option<AdjustOption>,
    /// Learning rate of what muon leaves to AdamW [default: --lr]
    #[arg(long, value_name = "LR", value_parser = learning_rate, help_heading = "Optimizer")]
    adamw_lr: Option<f64>,
}

fn betas(text: &str) -> std::result::Result<(f64, f64), &'static str> {
    let beta = |text: &str| text.trim().parse().ok().filter(|beta: &f64| (0.0..1.0).contains(beta));
    let both = text.split_once(',').and_then(|(a, b)| Some((beta(a)?, beta(b)?)));
    both.ok_or("give two numbers from 0 to below 1, such as 0.9,0.95")
}

pub(super) fn momentum(text: &str) -> std::result::Result<f64, &'static str> {
    let momentum = text.parse().ok().filter(|momentum: &f64| (0.0..1.0).contains(momentum));
    momentum.ok_or("give a number from 0 to below 1, such as 0.95")
}

/// Returns what an adjustment is called on the command line.
pub(in crate::language) fn adjust_name(adjust: AdjustRate) -> String {
    value_name(&match adjust {
        AdjustRate::Original => AdjustOption::Original,
        AdjustRate::MatchRmsAdamW => AdjustOption::MatchRmsAdamW,
        AdjustRate::SpectralUnclamped => AdjustOption::SpectralUnclamped,
    })
}

impl OptimizerOptions {
    /// Returns the options that were given and are not those of every optimizer.
    fn given(&self) -> Vec<(&'static str, String)> {
        let text = |number: f64| number.to_string();
        let all = [
            ("--betas", self.betas.map(|(a, b)| format!("{a},{b}"))),
            ("--eps", self.eps.map(text)),
            ("--momentum", self.momentum.map(text)),
            ("--nesterov", self.nesterov.map(|nesterov| nesterov.to_string())),
            ("--adjust-lr", self.adjust_lr.map(|adjust| value_name(&adjust))),
            ("--adamw-lr", self.adamw_lr.map(text)),
        ];
        all.into_iter().filter_map(|(option, got)| Some((option, got?))).collect()
    }
}

impl OptimizerOption {
    /// Whether it has an option that not all have.
    fn has(self, option: &str) -> bool {
        match self {
            Self::Adamw => ["--betas", "--eps"].contains(&option),
            Self::Muon => true,
            Self::Sgd => ["--momentum", "--nesterov"].contains(&option),
        }
    }
}

impl TrainOptions {
    /// Checks that the optimizer has the options that are given.
    ///
    /// # Errors
    /// One that it has not; values that do not go together.
    pub(in crate::language) fn check_optimizer(&self) -> Result<()> {
        let options = &self.optimizer;
        let optimizer = options.optimizer;
        let refuse = |option, got: String, help: String| Err(Error::Option { option, got, help });
        for (option, got) in options.given() {
            if !optimizer.has(option) {
                let others = OptimizerOption::value_variants().iter().filter(|other| other.has(option));
                let others: Vec<String> = others.map(value_name).collect();
                let (others, own) = (others.join(" or "), value_name(&optimizer));
                let help =
                    format!("the optimizer {own} has none: leave it out, or give --optimizer {others}");
                return refuse(option, got, help);
            }
        }
        match optimizer {
            OptimizerOption::Sgd
                if options.nesterov == Some(true) && options.momentum.unwrap_or(0.0) == 0.0 =>
            {
                refuse("--nesterov", "true".into(), "it needs a --momentum above 0".into())
            }
            OptimizerOption::Muon if self.lr == 0.0 => {
                refuse("--lr", "0".into(), "it must be above 0 with --optimizer muon".into())
            }
            _ => Ok(()),
        }
    }

    /// Returns the same as [`plan`] takes it.
    pub(super) fn planned_optimizer(&self) -> Optimizer {
        match self.optimizer.optimizer {
            OptimizerOption::Adamw => Optimizer::Adam,
            OptimizerOption::Muon => Optimizer::Muon,
            OptimizerOption::Sgd if self.optimizer.momentum.unwrap_or(0.0) > 0.0 => Optimizer::Momentum,
            OptimizerOption::Sgd => Optimizer::Sgd,
        }
    }

    /// Returns the optimizer with its hyperparameters.
    pub(super) fn optimizer_config(&self) -> OptimizerConfig {
        let options = &self.optimizer;
        let (beta1, beta2) = options.betas.unwrap_or((0.9, 0.95));
        let weight_decay = options.weight_decay.unwrap_or(0.1);
        let adam = AdamConfig {
            learning_rate: options.adamw_lr.unwrap_or(self.lr),
            beta1,
            beta2,
            eps: options.eps.unwrap_or(1e-8),
            weight_decay,
            ..AdamConfig::adamw()
        };
        match options.optimizer {
            OptimizerOption::Adamw => OptimizerConfig::AdamW(adam),
            OptimizerOption::Muon => OptimizerConfig::muon(MuonConfig {
                learning_rate: self.lr,
                momentum: options.momentum.unwrap_or(0.95),
                nesterov: options.nesterov.unwrap_or(true),
                weight_decay,
                adjust: match options.adjust_lr {
                    Some(AdjustOption::Original) => AdjustRate::Original,
                    Some(AdjustOption::SpectralUnclamped) => AdjustRate::SpectralUnclamped,
                    Some(AdjustOption::MatchRmsAdamW) | None => AdjustRate::MatchRmsAdamW,
                },
                adam,
                ..MuonConfig::default()
            }),
            OptimizerOption::Sgd => OptimizerConfig::Sgd(SgdConfig {
                learning_rate: self.lr,
                momentum: options.momentum.unwrap_or(0.0),
                weight_decay: options.weight_decay.unwrap_or(0.0),
                nesterov: options.nesterov.unwrap_or(false),
                ..SgdConfig::default()
            }),
        }
    }
}
