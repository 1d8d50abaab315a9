//! Threads that answer a search's tasks.

use paceline_search::{Answer, Progress, Request, SearchResult, Task, Worker, search_with};
use std::num::NonZero;
use std::sync::mpsc::channel;
use std::thread;

/// Searches on all cores. The result does not depend on their number.
pub(crate) fn search(
    request: &Request<'_>,
    progress: impl FnMut(&Progress<'_>) -> bool,
) -> SearchResult {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(64);
    thread::scope(|scope| {
        let (answered, answers) = channel::<(usize, Answer)>();
        let mut lines = Vec::new();
        for _ in 0..threads {
            let (line, tasks) = channel::<(usize, Task)>();
            let answered = answered.clone();
            lines.push(line);
            scope.spawn(move || {
                let mut worker = Worker::new(request);
                for (index, task) in tasks {
                    if answered.send((index, worker.answer(&task))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(answered);
        let answer = |tasks: Vec<Task>| {
            let count = tasks.len();
            let mut long = 0;
            for (index, task) in tasks.into_iter().enumerate() {
                // Workers with the same layers price them once.
                let to = if task.is_long() {
                    long += 1;
                    long % threads
                } else {
                    (task.key() % threads as u64) as usize
                };
                lines[to].send((index, task)).expect("a worker ends after its tasks");
            }
            let mut all: Vec<Option<Answer>> = (0..count).map(|_| None).collect();
            for (index, answer) in answers.iter().take(count) {
                all[index] = Some(answer);
            }
            all.into_iter().map(|answer| answer.expect("every task has an answer")).collect()
        };
        let result = search_with(request, answer, progress);
        drop(lines);
        result
    })
}
