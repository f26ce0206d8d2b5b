// A travelling salesman who gets better by and by: simulated annealing over a random map, all of it in memory.
//
//   solver DIRECTORY CITIES    reads requests from the FIFO DIRECTORY/in, answers each with one line on DIRECTORY/out
//     anneal STEPS TEMPERATURE   try so many changes; worse ones are taken more often while it is hot
//     length                     of the tour, and how many changes were tried so far
//     quit

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>

struct City {
    double x, y;
};

class Tour {
  public:
    explicit Tour(int cities) : dice_(42) {
        std::uniform_real_distribution<double> anywhere(0, 1000);
        for (int i = 0; i < cities; i++) map_.push_back({anywhere(dice_), anywhere(dice_)});
        for (int i = 0; i < cities; i++) order_.push_back(i);
    }

    // Turns a stretch of the tour round, if that is shorter or if it is hot enough.
    void anneal(long steps, double temperature) {
        std::uniform_int_distribution<int> any(0, static_cast<int>(order_.size()) - 1);
        std::uniform_real_distribution<double> chance(0, 1);
        for (long step = 0; step < steps; step++, tried_++) {
            int from = any(dice_), to = any(dice_);
            if (from > to) std::swap(from, to);
            if (from == 0 && to == static_cast<int>(order_.size()) - 1) continue;
            double heat = temperature * (1.0 - static_cast<double>(step) / static_cast<double>(steps));
            double change = between(from - 1, to) + between(from, to + 1) - between(from - 1, from) - between(to, to + 1);
            if (change < 0 || (heat > 0 && chance(dice_) < std::exp(-change / heat)))
                for (int a = from, b = to; a < b; a++, b--) std::swap(order_[a], order_[b]);
        }
    }

    std::string answer() const {
        double length = 0;
        for (int i = 0; i < static_cast<int>(order_.size()); i++) length += between(i, i + 1);
        char text[80];
        std::snprintf(text, sizeof text, "%.6f %ld", length, tried_);
        return text;
    }

  private:
    double between(int a, int b) const {
        int n = static_cast<int>(order_.size());
        const City &p = map_[order_[(a + n) % n]], &q = map_[order_[(b + n) % n]];
        return std::hypot(p.x - q.x, p.y - q.y);
    }

    std::mt19937_64 dice_;
    std::vector<City> map_;
    std::vector<int> order_;
    long tried_ = 0;
};

int main(int argc, char **argv) {
    if (argc != 3) {
        std::cerr << "usage: solver DIRECTORY CITIES\n";
        return 2;
    }
    std::string in = std::string(argv[1]) + "/in", out = std::string(argv[1]) + "/out";
    mkfifo(in.c_str(), 0600);
    mkfifo(out.c_str(), 0600);
    // Open both ways, so that neither ends when the one who asked goes away.
    std::fstream requests(in), answers(out);
    if (!requests || !answers) {
        std::cerr << "solver: cannot open " << in << " and " << out << "\n";
        return 1;
    }
    Tour tour(std::stoi(argv[2]));
    for (std::string line; std::getline(requests, line);) {
        std::istringstream words(line);
        std::string verb;
        long steps = 0;
        double temperature = 0;
        words >> verb >> steps >> temperature;
        if (verb == "quit") return 0;
        if (verb == "anneal") tour.anneal(steps, temperature);
        if (verb.empty()) continue;
        answers << (verb == "anneal" || verb == "length" ? tour.answer() : "what?") << std::endl;
    }
}
