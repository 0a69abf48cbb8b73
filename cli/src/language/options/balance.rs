//! How experts are balanced: `--balance` and `--balance-coefficient`.

use clap::ValueEnum;
use girandole::ExpertBalance;
use models::{ExpertsConfig, ModelConfig};
use ops::BalanceLoss;

use super::TrainOptions;
use crate::error::{Error, Result};
use crate::options::value_name;

/// What keeps experts equally loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::language) enum BalanceOption {
    /// A loss of each row.
    Row,
    /// A loss of all rows of a step, as in transformers.
    Batch,
    /// Nothing.
    None,
}

impl TrainOptions {
    /// Returns how the experts of a model are balanced.
    ///
    /// # Errors
    /// Options for experts, and a model without any.
    pub(in crate::language) fn balance(&self, model: &ModelConfig) -> Result<Option<ExpertBalance>> {
        let Some(experts) = &model.experts else {
            let given = [
                ("--balance", self.balance.map(|how| value_name(&how))),
                ("--balance-coefficient", self.balance_coefficient.map(|factor| factor.to_string())),
            ];
            return match given.into_iter().find_map(|(option, got)| Some((option, got?))) {
                None => Ok(None),
                Some((option, got)) => {
                    let help = format!("this model, a {}, has no experts: leave it out", model.family);
                    Err(Error::Option { option, got, help })
                }
            };
        };
        let balance = self.balance_of(experts);
        match (balance.loss, self.balance_coefficient) {
            (None, Some(factor)) => {
                let help =
                    "no loss balances the experts: give --balance row or batch, or leave it out".into();
                Err(Error::Option { option: "--balance-coefficient", got: factor.to_string(), help })
            }
            _ => Ok(Some(balance)),
        }
    }

    /// Returns how these experts are balanced.
    pub(in crate::language) fn balance_of(&self, experts: &ExpertsConfig) -> ExpertBalance {
        let loss = match self.balance {
            Some(BalanceOption::Row) => Some(BalanceLoss::Row),
            Some(BalanceOption::Batch) => Some(BalanceLoss::Batch),
            Some(BalanceOption::None) => None,
            None => experts.is_balanced.then_some(BalanceLoss::Batch),
        };
        let coefficient = self.balance_coefficient.unwrap_or(experts.balance_coefficient);
        ExpertBalance { loss, coefficient, experts: experts.count }
    }
}

/// Returns what a loss that balances experts is called on the command line.
pub(in crate::language) fn balance_name(loss: Option<BalanceLoss>) -> String {
    value_name(&match loss {
        Some(BalanceLoss::Row) => BalanceOption::Row,
        Some(BalanceLoss::Batch) => BalanceOption::Batch,
        None => BalanceOption::None,
    })
}
