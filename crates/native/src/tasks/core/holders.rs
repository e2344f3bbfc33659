//! Requests of clients other than tasks: to hold, locate, replicate, cancel and release.
//!
//! Does not free objects that are no longer held; [`super::graph`] does.

use super::{Action, ClientId, Core, ObjectId, ObjectKey, Product, State, TaskError};

impl Core {
    pub(super) fn send_location(&mut self, client: ClientId, key: ObjectKey) {
        let object = &self.objects[key];
        let id = object.id;
        self.actions.push(match object.inline() {
            Some(bytes) => {
                let product = Product::Inline(bytes.to_vec());
                Action::Available { client, object: id, product }
            }
            None => Action::At { client, object: id, workers: object.replicas().to_vec() },
        });
    }

    pub(super) fn release(&mut self, key: ObjectKey, client: ClientId) {
        let object = &mut self.objects[key];
        if let Some(at) = object.holders.iter().position(|holder| *holder == client) {
            object.holders.swap_remove(at);
            self.garbage.push(key);
        }
    }

    pub(super) fn client_gone(&mut self, client: ClientId) {
        for (key, object) in self.objects.iter_mut() {
            let before = object.holders.len();
            object.holders.retain(|holder| *holder != client);
            if object.holders.len() != before {
                self.garbage.push(key);
            }
        }
        for askers in self.askers.values_mut() {
            askers.retain(|asker| *asker != client);
        }
    }

    pub(super) fn hold(&mut self, client: ClientId, id: ObjectId) {
        let Some(key) = self.known(client, id) else { return };
        self.objects[key].holders.push(client);
        let object = &self.objects[key];
        if let Some(error) = object.error() {
            let error = error.clone();
            self.actions.push(Action::Unavailable { client, object: id, error });
        } else if let Some(product) = object.product() {
            self.actions.push(Action::Available { client, object: id, product });
        } else if let Some(task) = object.producer {
            // So far it may not have been needed.
            self.activate(task);
        }
    }

    pub(super) fn locate(&mut self, client: ClientId, id: ObjectId) {
        let Some(key) = self.known(client, id) else { return };
        let object = &self.objects[key];
        if let Some(error) = object.error() {
            let error = error.clone();
            self.actions.push(Action::Unavailable { client, object: id, error });
        } else if object.is_available() {
            self.send_location(client, key);
        } else {
            let askers = self.askers.entry(key).or_default();
            if !askers.contains(&client) {
                askers.push(client);
            }
        }
    }

    fn known(&mut self, client: ClientId, id: ObjectId) -> Option<ObjectKey> {
        let key = self.objects.key(id);
        if key.is_none() {
            let reason = "there is no such object".to_owned();
            let error = TaskError::Refused { task: id, reason };
            self.actions.push(Action::Unavailable { client, object: id, error });
        }
        key
    }

    pub(super) fn cancel(&mut self, client: ClientId, id: ObjectId) {
        let Some(output) = self.objects.key(id) else { return };
        let object = &self.objects[output];
        let (Some(key), true) = (object.producer, object.holders.contains(&client)) else { return };
        let task = &self.tasks[key];
        if task.products.iter().any(|output| self.objects[*output].is_available()) {
            // It has run before, and runs again because an output was lost.
            return;
        }
        let error = TaskError::Cancelled { task: task.id };
        match self.tasks[key].state {
            State::Idle | State::Failed => {}
            State::Waiting | State::Ready | State::Queued => self.fail(key, &error),
            State::Sent => {
                self.retract(self.tasks[key].placed.worker, key, true);
                for at in 0..self.tasks[key].products.len() {
                    let output = self.tasks[key].products[at];
                    self.fail_object(output, &error);
                }
            }
        }
    }
}
