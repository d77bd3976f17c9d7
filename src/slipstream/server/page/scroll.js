// Follows the growing answer, until the reader scrolls up; then it offers a way back and leaves the text where it is.

const NEAR = 48;

export class Follower {
  /** @param {HTMLElement} scroller @param {HTMLElement} jump */
  constructor(scroller, jump) {
    this.scroller = scroller;
    this.jump = jump;
    this.following = true;
    this.last = scroller.scrollTop;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.#leave(), { passive: true });
    jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.update()).observe(scroller);
  }

  get #distance() {
    return this.scroller.scrollHeight - this.scroller.clientHeight - this.scroller.scrollTop;
  }

  #leave() {
    if (this.#distance > 0 || this.scroller.scrollTop > 0) this.following = false;
    this.#show();
  }

  #scrolled() {
    // Upward movement is the reader's: text that grows or our own following only ever moves down.
    if (this.scroller.scrollTop < this.last - 1) this.following = false;
    if (this.#distance <= 1 || (this.scroller.scrollTop > this.last && this.#distance < NEAR)) this.following = true;
    this.last = this.scroller.scrollTop;
    this.#show();
  }

  #show() {
    this.jump.hidden = this.following || this.#distance < NEAR;
  }

  /** To be called when text was added. */
  update() {
    if (this.following) {
      this.scroller.scrollTop = this.scroller.scrollHeight;
      this.last = this.scroller.scrollTop;
    }
    this.#show();
  }

  toEnd() {
    this.following = true;
    this.update();
  }
}
