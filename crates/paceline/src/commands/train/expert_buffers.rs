//! A run whose experts' buffers have overflowed goes on with larger ones.

use super::{DEFAULTS, Job, check_plan, fits_limit, shm_domain};
use crate::failure::Failure;
use crate::flags::{CheckpointOptions, Defaults, Problems, StrategyFlags};
use crate::launch::{LargerBuffers, RankProcess};
use crate::output::{Journal, Output, RestartRecord, RunDir};
use paceline_exec::ExecError;
use paceline_exec::checkpoint::Checkpoint;
use paceline_plan::program::Plan;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder, in the directory of a run that is not saved, for what it goes on from.
const SCRATCH: &str = ".expert-buffers";

impl Job {
    /// Folder for the state from which a run that is not saved goes on.
    pub(super) fn scratch_folder(directory: &Path) -> PathBuf {
        directory.join(SCRATCH)
    }

    /// Buffers with which a failed run can go on, if it failed for lack of them.
    pub(super) fn larger_buffers(&self, error: &ExecError) -> Option<LargerBuffers> {
        let needed = error.needed_expert_buffers()?;
        let buffers = self.plan.expert_buffers()?;
        Some(LargerBuffers { needed, before: buffers.factor, factor: buffers.enlarged(needed) })
    }

    /// Asks the launcher of a failed rank for larger buffers, if that is what the run needs.
    pub(super) fn asks_for_buffers(
        &self,
        error: &ExecError,
        member: &RankProcess,
    ) -> Option<Failure> {
        let directory = member.place.launched.as_deref()?;
        let asked = self.larger_buffers(error)?.ask(directory);
        Some(asked.map_or_else(Failure::Run, |()| Failure::Reported))
    }

    /// Plans the run once more, with larger buffers.
    pub(super) fn enlarge(&mut self, larger: &LargerBuffers) -> Result<(), Failure> {
        let mut strategy = self.asked.0.clone();
        strategy.expert_buffer_factor = Some(larger.factor.to_string());
        self.plan = self.lower_again(&strategy)?;
        self.asked.0 = strategy;
        self.settings.set("expert-buffer-factor", larger.factor.into());
        Ok(())
    }

    /// Plan of other strategy flags for this run.
    pub(super) fn lower_again(&self, strategy: &StrategyFlags) -> Result<Plan, Failure> {
        let flags = &self.asked.1;
        let on = flags.cluster.is_some().then_some((flags, &self.cluster));
        let mut problems = Problems::default();
        let shm_domain = shm_domain(&self.launch, strategy);
        let (limit, library) = (self.launch.memory_limit, self.launch.library);
        let defaults = Defaults { limit, shm_domain, library, ..DEFAULTS };
        let request = strategy.check(defaults, on, &mut problems);
        if let Some(request) = &request {
            fits_limit(&request.plan, limit, &mut problems);
        }
        let Some(request) = request.filter(|_| problems.is_empty()) else {
            return Err(problems.into());
        };
        check_plan(&request.plan)?;
        Ok(request.plan)
    }

    /// Goes on with larger buffers from the newest state there is: that before the iteration that
    /// overflowed, where it could be saved.
    pub(super) fn go_on(
        mut self,
        larger: LargerBuffers,
        directory: RunDir,
        output: &Output,
    ) -> Result<(), Failure> {
        self.enlarge(&larger)?;
        if let Some(newest) = newest(directory.path(), self.training.iterations) {
            self.keeping.resume = Some(Arc::new(newest));
        }
        let from = self.keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        let restart = RestartRecord { after: from, cause: larger.cause() };
        Journal::note_restart(&directory, restart)?;
        larger.report(from, output);
        self.run_leader(directory, None, output)
    }

    /// Removes what only the run itself could go on from.
    pub(super) fn clear_scratch(directory: &RunDir) {
        let _ = std::fs::remove_dir_all(Self::scratch_folder(directory.path()));
    }
}

/// Newest whole checkpoint of a run in progress, saved on request or to go on from.
pub(super) fn newest(directory: &Path, iterations: u32) -> Option<Checkpoint> {
    let folders = [CheckpointOptions::folder(directory), Job::scratch_folder(directory)];
    let found =
        folders.iter().filter_map(|folder| Checkpoint::newest_whole(folder, iterations).ok());
    found.map(|(checkpoint, _)| checkpoint).max_by_key(|checkpoint| checkpoint.state().iteration)
}
